/* A stand-in for what libcuda is inside a CUDA process: GPU memory, kernel launches, and the restore thread.
 *
 * The restore thread is a real thread that shares no lock with the others (and runs no Python), so that it
 * can do its work while every other thread of the process is held by ptrace, as the real one can.
 *
 * faults, one a line, read at every call:  ACTION=EFFECT [pid N] [call K] [after K]
 *   ACTION  tid state lock checkpoint restore unlock
 *   EFFECT  a number: return it and do nothing (restore=2 also makes later restores fail for good)
 *           hang: never answer        hang:S: wait S seconds first, then do it
 *           kill: the process dies of SIGSEGV        fail:N: the state becomes FAILED, return N
 *           done:N: do it, then return N
 *   pid N   only in that process      call K: only the K-th such call      after K: only after K of them
 */
#define _GNU_SOURCE
#include "fakegpu.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, OPERATING_SYSTEM = 304,
       ILLEGAL_STATE = 401, NOT_READY = 600 };

static int state = RUNNING, lost, listener = -1;
static int gpu, memory_fd = -1, device_fd = -1;
static long long memory_bytes;
static void *host_copy;
static char device_path[256], original_uuids[16][64];
static int gate;     /* 1: new launches wait */
static int inflight; /* launches on the GPU now */

static void sleep_ms(long long ms)
{
	struct timespec left = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

static void set_gate(int closed)
{
	__atomic_store_n(&gate, closed, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &gate, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

static void begin_call(void)
{
	for (;;) {
		while (__atomic_load_n(&gate, __ATOMIC_SEQ_CST))
			syscall(SYS_futex, &gate, FUTEX_WAIT, 1, NULL, NULL, 0);
		__atomic_add_fetch(&inflight, 1, __ATOMIC_SEQ_CST);
		if (!__atomic_load_n(&gate, __ATOMIC_SEQ_CST))
			return;
		__atomic_sub_fetch(&inflight, 1, __ATOMIC_SEQ_CST);
	}
}

static void end_call(void)
{
	__atomic_sub_fetch(&inflight, 1, __ATOMIC_SEQ_CST);
}

static void memory_path(char *path, size_t size)
{
	snprintf(path, size, "%s/gpu%d", directory, gpu);
	mkdir(path, 0700);
	snprintf(path, size, "%s/gpu%d/%d.mem", directory, gpu, getpid());
}

static int open_memory(void)
{
	char path[600];

	memory_path(path, sizeof(path));
	memory_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (memory_fd < 0 || ftruncate(memory_fd, memory_bytes))
		return errno;
	if (device_path[0])
		device_fd = open(device_path, O_RDWR | O_CLOEXEC);
	return device_path[0] && device_fd < 0 ? errno : 0;
}

static void close_memory(void)
{
	char path[600];

	memory_path(path, sizeof(path));
	close(memory_fd);
	unlink(path);
	if (device_fd >= 0)
		close(device_fd);
	memory_fd = device_fd = -1;
}

static int copy(int to_host)
{
	long long done = 0;

	sleep_ms(config_number("copy_ms", 0));
	while (done < memory_bytes) {
		char *at = (char *)host_copy + done;
		size_t rest = memory_bytes - done;
		ssize_t n = to_host ? pread(memory_fd, at, rest, done) : pwrite(memory_fd, at, rest, done);

		if (n <= 0)
			return OUT_OF_MEMORY;
		done += n;
	}
	return SUCCESS;
}

static long long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int do_lock(long long timeout_ms)
{
	long long start = now_ms();

	if (state != RUNNING)
		return ILLEGAL_STATE;
	set_gate(1);
	while (__atomic_load_n(&inflight, __ATOMIC_SEQ_CST)) {
		if (timeout_ms && now_ms() - start >= timeout_ms) {
			set_gate(0);
			return NOT_READY;
		}
		sleep_ms(1);
	}
	state = LOCKED;
	return SUCCESS;
}

static int do_checkpoint(void)
{
	if (state != LOCKED)
		return ILLEGAL_STATE;
	host_copy = mmap(NULL, memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (host_copy == MAP_FAILED || copy(1))
		return OUT_OF_MEMORY;
	close_memory();
	state = CHECKPOINTED;
	return SUCCESS;
}

/* Which GPU the memory goes to; MAP is "OLD=NEW,OLD=NEW" and must name every GPU, or "-". */
static int mapped_gpu(const char *map)
{
	char want[64], now[64];
	const char *pair;
	int pairs = 1, index;

	snprintf(want, sizeof(want), "%s", original_uuids[gpu]);
	if (strcmp(map, "-")) {
		for (pair = map; *pair; pair++)
			pairs += *pair == ',';
		pair = strstr(map, want);
		while (pair && pair != map && pair[-1] != ',')
			pair = strstr(pair + 1, want); /* it was the NEW of another pair */
		if (pairs != gpu_count() || !pair || pair[strlen(want)] != '=')
			return -1;
		snprintf(want, strlen(want) + 1, "%s", pair + strlen(want) + 1);
	}
	for (index = 0; index < gpu_count(); index++) {
		gpu_uuid(index, now);
		if (!strcmp(now, want))
			return index;
	}
	return -1;
}

static int do_restore(int initialised, const char *map)
{
	int target;

	if (lost)
		return OPERATING_SYSTEM;
	if (state != CHECKPOINTED)
		return ILLEGAL_STATE;
	if (!initialised && !config_number("persistence", 1))
		return NOT_INITIALIZED;
	target = mapped_gpu(map);
	if (target < 0)
		return INVALID_VALUE;
	if (gpu_free(target) < memory_bytes) {
		lost = 1;
		return OUT_OF_MEMORY;
	}
	gpu = target;
	gpu_uuid(gpu, original_uuids[gpu]);
	if (open_memory() || copy(0))
		return OPERATING_SYSTEM;
	munmap(host_copy, memory_bytes);
	host_copy = NULL;
	state = LOCKED;
	return SUCCESS;
}

static int do_unlock(void)
{
	if (state != LOCKED)
		return ILLEGAL_STATE;
	state = RUNNING;
	set_gate(0);
	return SUCCESS;
}

static int act(const char *action, const char *arguments, int *value)
{
	char map[2048] = "-";
	int initialised = 0;

	if (!strcmp(action, "tid"))
		*value = (int)syscall(SYS_gettid);
	else if (!strcmp(action, "state"))
		*value = state;
	else if (!strcmp(action, "lock"))
		return do_lock(atoll(arguments));
	else if (!strcmp(action, "checkpoint"))
		return do_checkpoint();
	else if (!strcmp(action, "restore") && sscanf(arguments, "%d %2047s", &initialised, map) >= 1)
		return do_restore(initialised, map);
	else if (!strcmp(action, "unlock"))
		return do_unlock();
	else
		return INVALID_VALUE;
	return SUCCESS;
}

/* Note the call; returns how many of this action there were before, in this process or in all. */
static void note_call(const char *action, int *in_process, int *in_all)
{
	char path[600], line[64], mine[64], prefix[32];
	FILE *file;

	snprintf(path, sizeof(path), "%s/calls", directory);
	snprintf(mine, sizeof(mine), "%s %d\n", action, getpid());
	snprintf(prefix, sizeof(prefix), "%s ", action);
	*in_process = *in_all = 0;
	file = fopen(path, "a+e");
	if (!file)
		return;
	while (fgets(line, sizeof(line), file)) {
		*in_process += !strcmp(line, mine);
		*in_all += !strncmp(line, prefix, strlen(prefix));
	}
	fputs(mine, file);
	fclose(file);
}

/* The effect that the faults file has for this call, "" for none. */
static void fault(const char *action, char *effect, size_t size)
{
	char path[600], line[256], *word, *rest;
	int in_process, in_all, number;
	FILE *file;

	effect[0] = 0;
	note_call(action, &in_process, &in_all);
	snprintf(path, sizeof(path), "%s/faults", directory);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file)) {
		int applies = 1, pid = 0, call = 0, after = 0;
		char *value = strchr(line, '=');

		if (!value)
			continue;
		*value++ = 0;
		if (strcmp(line, action))
			continue;
		value = strtok_r(value, " \n", &rest);
		while (value && (word = strtok_r(NULL, " \n", &rest))) {
			char *operand = strtok_r(NULL, " \n", &rest);

			number = operand ? atoi(operand) : 0;
			if (!strcmp(word, "pid"))
				pid = number;
			else if (!strcmp(word, "call"))
				call = number;
			else if (!strcmp(word, "after"))
				after = number;
		}
		number = pid ? in_process : in_all;
		applies &= !pid || pid == getpid();
		applies &= !call || number + 1 == call;
		applies &= number >= after;
		if (value && applies) {
			snprintf(effect, size, "%s", value);
			break;
		}
	}
	if (file)
		fclose(file);
}

static int act_or_fail(const char *action, const char *arguments, int *value)
{
	char effect[64];
	int code;

	fault(action, effect, sizeof(effect));
	if (!strcmp(effect, "kill")) {
		signal(SIGSEGV, SIG_DFL);
		kill(getpid(), SIGSEGV); /* at the process, as a crash in a thread that blocks signals would end it */
		sleep_ms(1000);
		_exit(139);
	}
	if (!strcmp(effect, "hang"))
		for (;;)
			pause();
	if (!strncmp(effect, "hang:", 5))
		sleep_ms((long long)(atof(effect + 5) * 1000));
	if (!strncmp(effect, "fail:", 5)) {
		state = FAILED;
		return atoi(effect + 5);
	}
	if (effect[0] >= '0' && effect[0] <= '9') {
		lost |= !strcmp(action, "restore") && atoi(effect) == OUT_OF_MEMORY;
		return atoi(effect);
	}
	code = act(action, arguments, value);
	return strncmp(effect, "done:", 5) ? code : atoi(effect + 5);
}

static void serve(int connection)
{
	char request[2200], action[32], answer[64];
	int size = 0, n, code, skip = 0, value = 0;

	while (size < (int)sizeof(request) - 1 && !memchr(request, '\n', size)) {
		n = recv(connection, request + size, sizeof(request) - 1 - size, 0);
		if (n <= 0)
			return;
		size += n;
	}
	request[size] = 0;
	if (sscanf(request, "%31s %n", action, &skip) != 1)
		return;
	code = act_or_fail(action, request + skip, &value);
	n = snprintf(answer, sizeof(answer), "%d %d\n", code, value);
	send(connection, answer, n, MSG_NOSIGNAL);
}

static void *restore_thread(void *unused)
{
	(void)unused;
	prctl(PR_SET_NAME, "cuda00001400001");
	for (;;) {
		int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

		if (connection < 0)
			continue;
		serve(connection);
		close(connection);
	}
	return NULL;
}

static int start_restore_thread(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	sigset_t all, before;
	pthread_t thread;
	int error;

	snprintf(address.sun_path, sizeof(address.sun_path), "%s/%d.sock", directory, getpid());
	unlink(address.sun_path);
	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 16))
		return errno;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(&thread, NULL, restore_thread, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return error;
}

/* "cuInit" and "cuMemAlloc" in one: BYTES of memory on GPU INDEX; 0 or an errno. */
int fakegpu_open(const char *dir, int index, long long bytes, const char *device)
{
	int each, error;

	snprintf(directory, sizeof(directory), "%s", dir);
	snprintf(device_path, sizeof(device_path), "%s", device);
	gpu = index;
	memory_bytes = bytes;
	for (each = 0; each < 16; each++)
		gpu_uuid(each, original_uuids[each]);
	if (gpu_free(gpu) < bytes)
		return ENOMEM;
	error = open_memory();
	return error ? error : start_restore_thread();
}

/* A kernel of MS milliseconds that raises the counter in the first word of the GPU memory; returns it. */
long long fakegpu_launch(long long ms)
{
	int64_t counter = 0;

	begin_call();
	sleep_ms(ms);
	if (pread(memory_fd, &counter, sizeof(counter), 0) != sizeof(counter))
		counter = -1;
	counter++;
	if (pwrite(memory_fd, &counter, sizeof(counter), 0) != sizeof(counter))
		counter = -1;
	end_call();
	return counter;
}

/* cuMemcpyDtoH and HtoD; how many bytes were copied. */
long long fakegpu_read(void *to, long long offset, long long size)
{
	long long n;

	begin_call();
	n = pread(memory_fd, to, size, offset);
	end_call();
	return n;
}

long long fakegpu_write(const void *from, long long offset, long long size)
{
	long long n;

	begin_call();
	n = pwrite(memory_fd, from, size, offset);
	end_call();
	return n;
}
