/* What the fake driver, the fake NVML and the fake CUDA process share: one directory that holds the "GPUs".
 *
 *   config        lines key=value: gpus, total, others.N, uuid.N, driver, cuda, persistence, mig, copy_ms
 *   faults        lines ACTION=EFFECT [pid N] [call K] [after K]      (see device.c)
 *   calls         every driver call that reached a process: "ACTION PID"
 *   gpuN/PID.mem  the memory of a process on GPU N
 *   PID.sock      the restore thread of a process
 */
#ifndef FAKEGPU_H
#define FAKEGPU_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define GPU_TOTAL (1LL << 30)

static char directory[512];

/* The value of KEY in config, else what stands in OUT already. */
static int config_text(const char *key, char *out, size_t size)
{
	char path[600], line[512];
	size_t length = strlen(key);
	int found = 0;
	FILE *file;

	snprintf(path, sizeof(path), "%s/config", directory);
	file = fopen(path, "re");
	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file)) {
		if (strncmp(line, key, length) || line[length] != '=')
			continue;
		line[strcspn(line, "\n")] = 0;
		snprintf(out, size, "%s", line + length + 1);
		found = 1;
	}
	fclose(file);
	return found;
}

static long long config_number(const char *key, long long fallback)
{
	char text[64];

	return config_text(key, text, sizeof(text)) ? atoll(text) : fallback;
}

static long long config_of_gpu(const char *key, int gpu, long long fallback)
{
	char name[64];

	snprintf(name, sizeof(name), "%s.%d", key, gpu);
	return config_number(name, config_number(key, fallback));
}

static void gpu_uuid(int gpu, char out[64])
{
	char name[32];

	snprintf(name, sizeof(name), "uuid.%d", gpu);
	snprintf(out, 64, "GPU-fa4e0000-0000-0000-0000-%012d", gpu);
	config_text(name, out, 64);
}

static int gpu_count(void)
{
	return (int)config_number("gpus", 1);
}

/* A process that ended gives its GPU memory back, reaped or not. */
static int process_lives(int pid)
{
	char path[64], text[512], *state;
	FILE *file;
	size_t size;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	file = fopen(path, "re");
	if (!file)
		return 0;
	size = fread(text, 1, sizeof(text) - 1, file);
	fclose(file);
	text[size] = 0;
	state = strrchr(text, ')');
	return state && state[2] != 'Z' && state[2] != 'X';
}

struct gpu_process {
	int pid;
	long long bytes;
};

/* The processes that have memory on GPU; returns how many, at most MAX. */
static int gpu_processes(int gpu, struct gpu_process *out, int max)
{
	char path[600];
	struct dirent *entry;
	struct stat status;
	int count = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "%s/gpu%d", directory, gpu);
	dir = opendir(path);
	if (!dir)
		return 0;
	while (count < max && (entry = readdir(dir))) {
		int pid = atoi(entry->d_name);

		if (pid <= 0 || !process_lives(pid) || fstatat(dirfd(dir), entry->d_name, &status, 0))
			continue;
		out[count].pid = pid;
		out[count++].bytes = status.st_size;
	}
	closedir(dir);
	return count;
}

static long long gpu_free(int gpu)
{
	struct gpu_process processes[256];
	int count = gpu_processes(gpu, processes, 256);
	long long left = config_of_gpu("total", gpu, GPU_TOTAL) - config_of_gpu("others", gpu, 0);

	while (count--)
		left -= processes[count].bytes;
	return left < 0 ? 0 : left;
}

#endif
