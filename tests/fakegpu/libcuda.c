/* A libcuda.so.1 with the checkpoint functions and nothing else: talks to the restore thread of a fake CUDA
 * process (device.c), so that the calls of gpuckpt block, fail and succeed as the driver's do.
 *
 * The fake GPUs' directory is the parent of the one this library was loaded from: programs that gpuckpt
 * starts get LD_LIBRARY_PATH and no variable of the tests. With -DOLD_DRIVER it is one without the functions.
 */
#define _GNU_SOURCE
#include "fakegpu.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, OPERATING_SYSTEM = 304 };

static int initialised;

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

int cuInit(unsigned flags)
{
	int code = (int)config_number("cuinit", SUCCESS);

	(void)flags;
	initialised |= code == SUCCESS;
	return code;
}

int cuDriverGetVersion(int *version)
{
	*version = (int)config_number("cuda", 13000);
	return SUCCESS;
}

#ifndef OLD_DRIVER

/* The number of a line of /proc/PID/status, the last one where it has several; 0 without it. */
static int status_number(int pid, const char *key)
{
	char path[64], line[256], *word, *rest;
	size_t length = strlen(key);
	int number = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/status", pid);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file)) {
		if (strncmp(line, key, length))
			continue;
		for (word = strtok_r(line + length, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest))
			number = atoi(word);
	}
	if (file)
		fclose(file);
	return number;
}

static int ask(int connection, const char *request, int *value)
{
	char answer[64];
	int size = 0, code, n;

	if (send(connection, request, strlen(request), MSG_NOSIGNAL) < 0)
		return OPERATING_SYSTEM;
	while (size < (int)sizeof(answer) - 1 && !memchr(answer, '\n', size)) {
		n = recv(connection, answer + size, sizeof(answer) - 1 - size, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return OPERATING_SYSTEM; /* it died */
		size += n;
	}
	answer[size] = 0;
	return sscanf(answer, "%d %d", &code, value) == 2 ? code : OPERATING_SYSTEM;
}

/* A thread id acts on its process, as with the driver; the name is the pid inside the process's own namespace. */
static int request(int pid, const char *text, int *value)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int process = status_number(pid, "Tgid:"), inner, connection, code;

	if (pid <= 0)
		return INVALID_VALUE;
	inner = process ? status_number(process, "NSpid:") : 0;
	if (!inner)
		return OPERATING_SYSTEM;
	snprintf(address.sun_path, sizeof(address.sun_path), "%s/%d.sock", directory, inner);
	connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connection < 0)
		return OPERATING_SYSTEM;
	if (connect(connection, (struct sockaddr *)&address, sizeof(address)))
		code = NOT_INITIALIZED;
	else
		code = ask(connection, text, value);
	close(connection);
	return code;
}

static int zeroed(const void *bytes, size_t from, size_t to)
{
	const char *at = bytes;

	while (from < to)
		if (at[from++])
			return 0;
	return 1;
}

static int has_fault(const char *action)
{
	char path[600], line[128];
	size_t length = strlen(action);
	int found = 0;
	FILE *file;

	snprintf(path, sizeof(path), "%s/faults", directory);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file))
		found |= !strncmp(line, action, length) && line[length] == '=';
	if (file)
		fclose(file);
	return found;
}

/* The restore thread by its name; 0 without one. */
static int named_thread(int process)
{
	char path[300], name[64];
	struct dirent *entry;
	int tid = 0;
	FILE *file;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", process);
	dir = opendir(path);
	while (dir && !tid && (entry = readdir(dir))) {
		snprintf(path, sizeof(path), "/proc/%d/task/%s/comm", process, entry->d_name);
		file = fopen(path, "re");
		if (file && fgets(name, sizeof(name), file) && !strncmp(name, "cuda0000", 8))
			tid = atoi(entry->d_name);
		if (file)
			fclose(file);
	}
	if (dir)
		closedir(dir);
	return tid;
}

/* Seen on driver 580.159: this one is answered for a stopped process too (the others wait), and a zombie has
 * no CUDA. With a fault for it the thread is asked. */
int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	int process = status_number(pid, "Tgid:");

	if (has_fault("tid"))
		return request(pid, "tid\n", tid);
	if (pid <= 0 || !process)
		return pid <= 0 ? INVALID_VALUE : OPERATING_SYSTEM;
	*tid = named_thread(process);
	return *tid ? SUCCESS : NOT_INITIALIZED;
}

int cuCheckpointProcessGetState(int pid, int *state)
{
	return request(pid, "state\n", state);
}

int cuCheckpointProcessLock(int pid, const void *args)
{
	char text[64];
	int unused;

	if (args && !zeroed(args, 4, 64))
		return INVALID_VALUE;
	snprintf(text, sizeof(text), "lock %u\n", args ? *(const uint32_t *)args : 0);
	return request(pid, text, &unused);
}

int cuCheckpointProcessCheckpoint(int pid, const void *args)
{
	int unused;

	return args && !zeroed(args, 0, 64) ? INVALID_VALUE : request(pid, "checkpoint\n", &unused);
}

static int write_uuid(char *to, const unsigned char *bytes)
{
	int at = sprintf(to, "GPU-"), index;

	for (index = 0; index < 16; index++)
		at += sprintf(to + at, index == 4 || index == 6 || index == 8 || index == 10 ? "-%02x" : "%02x", bytes[index]);
	return at;
}

int cuCheckpointProcessRestore(int pid, const void *args)
{
	const unsigned char *pairs = args ? *(const unsigned char *const *)args : NULL;
	uint32_t count = args ? *(const uint32_t *)((const char *)args + 8) : 0, index;
	char text[2200];
	int at = sprintf(text, "restore %d ", initialised), unused;

	if (args && (!zeroed(args, 12, 64) || count > 16 || !pairs != !count))
		return INVALID_VALUE;
	for (index = 0; index < count; index++) {
		at += sprintf(text + at, "%s", index ? "," : "");
		at += write_uuid(text + at, pairs + index * 32);
		at += sprintf(text + at, "=");
		at += write_uuid(text + at, pairs + index * 32 + 16);
	}
	sprintf(text + at, count ? "\n" : "-\n");
	return request(pid, text, &unused);
}

int cuCheckpointProcessUnlock(int pid, const void *args)
{
	int unused;

	return args && !zeroed(args, 0, 64) ? INVALID_VALUE : request(pid, "unlock\n", &unused);
}

#endif
