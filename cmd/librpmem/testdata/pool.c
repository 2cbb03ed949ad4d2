/* The functions of librpmem by their public prototypes, as its manual page has them, from a library that is loaded as libpmemobj loads it.
 *
 *   pool TARGET NAME
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct rpmem_pool RPMEMpool;
struct rpmem_pool_attr {
	char signature[8];
	uint32_t major, compat_features, incompat_features, ro_compat_features;
	unsigned char poolset_uuid[16], uuid[16], next_uuid[16], prev_uuid[16], user_flags[16];
};

static RPMEMpool *(*rpmem_create)(const char *, const char *, void *, size_t, unsigned *, const struct rpmem_pool_attr *);
static RPMEMpool *(*rpmem_open)(const char *, const char *, void *, size_t, unsigned *, struct rpmem_pool_attr *);
static int (*rpmem_set_attr)(RPMEMpool *, const struct rpmem_pool_attr *);
static int (*rpmem_close)(RPMEMpool *);
static int (*rpmem_persist)(RPMEMpool *, size_t, size_t, unsigned, unsigned);
static int (*rpmem_deep_persist)(RPMEMpool *, size_t, size_t, unsigned);
static int (*rpmem_flush)(RPMEMpool *, size_t, size_t, unsigned, unsigned);
static int (*rpmem_drain)(RPMEMpool *, unsigned, unsigned);
static int (*rpmem_read)(RPMEMpool *, void *, size_t, size_t, unsigned);
static int (*rpmem_remove)(const char *, const char *, int);
static const char *(*rpmem_check_version)(unsigned, unsigned);
static const char *(*rpmem_errormsg)(void);

#define BYTES ((size_t)1 << 20)
#define THREADS 4

#define CHECK(x) \
	do { \
		if (!(x)) { \
			fprintf(stderr, "line %d: %s: errno %d: %s\n", __LINE__, #x, errno, rpmem_errormsg ? rpmem_errormsg() : ""); \
			exit(1); \
		} \
	} while (0)
#define FAILS(x, e) CHECK((errno = 0, (x)) && errno == (e) && rpmem_errormsg()[0] != 0)

static void load(void *lib, const char *name, void *to) {
	void *f = dlsym(lib, name);
	CHECK(f != NULL);
	memcpy(to, &f, sizeof f);
}

static char *memory;
static RPMEMpool *open_pool;

static void *persists(void *arg) {
	uintptr_t me = (uintptr_t)arg;
	size_t at = 4096 + 4096 * me;
	for (int i = 0; i < 100; i++) {
		memory[at + i] = (char)(i + 1);
		CHECK(rpmem_persist(open_pool, at + i, 1, (unsigned)me, 0) == 0);
	}
	return NULL;
}

int main(int argc, char **argv) {
	CHECK(argc == 3);
	const char *target = argv[1], *name = argv[2];
	void *lib = dlopen("librpmem.so.1", RTLD_NOW);
	CHECK(lib != NULL);
#define LOAD(f) load(lib, #f, &f)
	LOAD(rpmem_create), LOAD(rpmem_open), LOAD(rpmem_set_attr), LOAD(rpmem_close), LOAD(rpmem_persist), LOAD(rpmem_deep_persist), LOAD(rpmem_flush);
	LOAD(rpmem_drain), LOAD(rpmem_read), LOAD(rpmem_remove), LOAD(rpmem_check_version), LOAD(rpmem_errormsg);
	CHECK(rpmem_check_version(1, 0) == NULL && rpmem_check_version(1, 3) == NULL && rpmem_check_version(1, 4) != NULL && rpmem_check_version(2, 0) != NULL);

	memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	struct rpmem_pool_attr attr = {.signature = "TESTPOOL", .major = 7, .uuid = {1, 2, 3}}, got;
	unsigned lanes = THREADS, none = 0;
	FAILS(rpmem_open(target, name, memory, BYTES, &lanes, &got) == NULL, ENOENT);
	FAILS(rpmem_create(NULL, name, memory, BYTES, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, NULL, memory, BYTES, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, "", memory, BYTES, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, name, NULL, BYTES, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, name, memory + 1, BYTES - 4096, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, name, memory, 4096, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, name, memory, BYTES - 1, &lanes, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, name, memory, BYTES, NULL, &attr) == NULL, EINVAL);
	FAILS(rpmem_create(target, name, memory, BYTES, &none, &attr) == NULL, EINVAL);
	FAILS(rpmem_create("-oProxyCommand=x@h", name, memory, BYTES, &lanes, &attr) == NULL, EINVAL);

	open_pool = rpmem_create(target, name, memory, BYTES, &lanes, &attr);
	CHECK(open_pool != NULL && lanes == THREADS);
	pthread_t t[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&t[i], NULL, persists, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	strcpy(memory + BYTES - 8, "flushed");
	CHECK(rpmem_flush(open_pool, BYTES - 8, 8, 0, 1) == 0 && rpmem_drain(open_pool, 0, 0) == 0);
	FAILS(rpmem_persist(open_pool, 4095, 1, 0, 0) == -1, EINVAL);
	FAILS(rpmem_persist(open_pool, BYTES, 1, 0, 0) == -1, EINVAL);
	FAILS(rpmem_persist(open_pool, 8192, SIZE_MAX, 0, 0) == -1, EINVAL);
	FAILS(rpmem_persist(open_pool, 8192, 1, THREADS, 0) == -1, EINVAL);
	FAILS(rpmem_persist((RPMEMpool *)memory, 8192, 1, 0, 0) == -1, EINVAL);
	FAILS(rpmem_persist(NULL, 8192, 1, 0, 0) == -1, EINVAL);
	FAILS(rpmem_deep_persist(open_pool, 8192, 1, 0) == -1, ENOTSUP); /* the cluster is in memory */
	FAILS(rpmem_read(open_pool, memory, 8192, BYTES, 0) == -1, EINVAL);
	FAILS(rpmem_read(open_pool, memory, 0, SIZE_MAX, 0) == -1, EINVAL);
	FAILS(rpmem_read(open_pool, NULL, 0, 1, 0) == -1, EINVAL);
	attr.major = 8;
	CHECK(rpmem_set_attr(open_pool, &attr) == 0);
	FAILS(rpmem_set_attr(open_pool, NULL) == -1, EINVAL);
	CHECK(rpmem_close(open_pool) == 0);
	FAILS(rpmem_close(open_pool) == -1, EINVAL);
	FAILS(rpmem_create(target, name, memory, BYTES, &lanes, &attr) == NULL, EEXIST);
	FAILS(rpmem_open(target, name, memory, 2 * BYTES, &lanes, &got) == NULL, EINVAL);

	/* By less memory than the pool has, as pmempool does: it reads all of it. */
	lanes = 1000000;
	RPMEMpool *again = rpmem_open(target, name, memory, 8192, &lanes, &got);
	CHECK(again != NULL && lanes > 0 && lanes < 1000);
	CHECK(memcmp(&got, &attr, sizeof got) == 0);
	static char back[BYTES];
	CHECK(rpmem_read(again, back, 0, BYTES, 0) == 0);
	CHECK(memcmp(back, memory, BYTES) == 0);
	FAILS(rpmem_persist(again, 8192, 1, 0, 0) == -1, EINVAL);
	CHECK(rpmem_close(again) == 0);
	FAILS(rpmem_remove(target, name, 4) == -1, EINVAL);
	CHECK(rpmem_remove(target, name, 3) == 0);
	FAILS(rpmem_remove(target, name, 0) == -1, ENOENT);
	puts("all is there");
	return 0;
}
