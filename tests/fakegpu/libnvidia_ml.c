/* A libnvidia-ml.so.1 over the same directory: the functions that gpuckpt's probe calls through pynvml.
 *
 * faults:  nvml.init=CODE    nvml.N=CODE | crash | hang      (N: the index of a GPU; 15 is GPU_IS_LOST)
 */
#define _GNU_SOURCE
#include "fakegpu.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

struct memory {
	unsigned long long total, free, used;
};

struct process_info {
	unsigned pid;
	unsigned long long used;
	unsigned gpu_instance, compute_instance;
};

struct pci_info {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char bus_id[32];
};

__attribute__((constructor)) static void find_directory(void)
{
	Dl_info info;
	int levels = 2;

	if (!dladdr((void *)find_directory, &info))
		return;
	snprintf(directory, sizeof(directory), "%s", info.dli_fname);
	while (levels-- && strrchr(directory, '/'))
		*strrchr(directory, '/') = 0;
}

static int fault(const char *name)
{
	char path[600], line[128], *value;
	int code = SUCCESS;
	FILE *file;

	snprintf(path, sizeof(path), "%s/faults", directory);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		value = strchr(line, '=');
		if (!value)
			continue;
		*value++ = 0;
		if (strcmp(line, name))
			continue;
		if (!strcmp(value, "crash"))
			raise(SIGSEGV);
		while (!strcmp(value, "hang"))
			pause();
		code = atoi(value);
	}
	if (file)
		fclose(file);
	return code;
}

static int index_of(const void *device)
{
	return (int)(long)device - 1;
}

int nvmlInit_v2(void)
{
	return fault("nvml.init");
}

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return fault("nvml.init");
}

int nvmlShutdown(void)
{
	return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
	snprintf(out, size, "580.159.04");
	config_text("driver", out, size);
	return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
	*version = (int)config_number("cuda", 13000);
	return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	return nvmlSystemGetCudaDriverVersion(version);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
	*count = gpu_count();
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
	char name[32];

	if ((int)index >= gpu_count())
		return INVALID_ARGUMENT;
	*device = (void *)(long)(index + 1);
	snprintf(name, sizeof(name), "nvml.%u", index);
	return fault(name);
}

int nvmlDeviceGetUUID(void *device, char *out, unsigned size)
{
	char uuid[64];

	gpu_uuid(index_of(device), uuid);
	snprintf(out, size, "%s", uuid);
	return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *out, unsigned size)
{
	(void)device;
	snprintf(out, size, "Fake GPU");
	config_text("name", out, size);
	return SUCCESS;
}

int nvmlDeviceGetMinorNumber(void *device, unsigned *minor)
{
	*minor = index_of(device);
	return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory)
{
	memory->total = config_of_gpu("total", index_of(device), GPU_TOTAL);
	memory->free = gpu_free(index_of(device));
	memory->used = memory->total - memory->free;
	return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info)
{
	memset(info, 0, sizeof(*info));
	info->bus = index_of(device) + 1;
	snprintf(info->bus_id, sizeof(info->bus_id), "00000000:%02X:00.0", info->bus);
	return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
	long long mig = config_of_gpu("mig", index_of(device), -1);

	*current = *pending = mig > 0;
	return mig < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *device, unsigned *mode)
{
	*mode = (unsigned)config_of_gpu("persistence", index_of(device), 1);
	return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process_info *out)
{
	struct gpu_process processes[256];
	int found = gpu_processes(index_of(device), processes, 256), index;
	unsigned room = *count;

	*count = found;
	if (!found)
		return SUCCESS;
	if (!out || room < (unsigned)found)
		return INSUFFICIENT_SIZE;
	for (index = 0; index < found; index++)
		out[index] = (struct process_info){ processes[index].pid, processes[index].bytes, ~0u, ~0u };
	return SUCCESS;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, struct process_info *out)
{
	(void)device;
	(void)out;
	*count = 0;
	return SUCCESS;
}
