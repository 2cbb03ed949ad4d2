/* Transactions of libpmemobj on a pool set: an unchanged program, which knows nothing of librpmem. It counts, and writes a dot when a transaction is committed.
 *
 *   objects SET create     makes the pool and counts from 0
 *   objects SET count      goes on to count, until it is killed
 *   objects SET read       prints the count, and where in the pool the root object is and ends
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct {
	uint64_t pool_uuid_lo, off;
} PMEMoid;
typedef struct pmemobjpool PMEMobjpool;

enum { SLOTS = 1000 };
struct root {
	uint64_t count;
	uint64_t slots[SLOTS]; /* number n is in slot n % SLOTS */
};

static void *lib;

static void *symbol(const char *name) {
	void *f = dlsym(lib, name);
	if (f == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return f;
}

static void fail(const char *what) {
	const char *(*message)(void) = (const char *(*)(void))symbol("pmemobj_errormsg");
	fprintf(stderr, "%s: %s\n", what, message());
	exit(1);
}

int main(int argc, char **argv) {
	if (argc != 3)
		return 2;
	lib = dlopen("libpmemobj.so.1", RTLD_NOW);
	if (lib == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		return 77;
	}
	PMEMobjpool *(*create)(const char *, const char *, size_t, mode_t) = (PMEMobjpool * (*)(const char *, const char *, size_t, mode_t)) symbol("pmemobj_create");
	PMEMobjpool *(*open)(const char *, const char *) = (PMEMobjpool * (*)(const char *, const char *)) symbol("pmemobj_open");
	void (*close)(PMEMobjpool *) = (void (*)(PMEMobjpool *))symbol("pmemobj_close");
	PMEMoid (*get_root)(PMEMobjpool *, size_t) = (PMEMoid(*)(PMEMobjpool *, size_t))symbol("pmemobj_root");
	void *(*direct)(PMEMoid) = (void *(*)(PMEMoid))symbol("pmemobj_direct");
	int (*begin)(PMEMobjpool *, jmp_buf, ...) = (int (*)(PMEMobjpool *, jmp_buf, ...))symbol("pmemobj_tx_begin");
	int (*range)(PMEMoid, uint64_t, size_t) = (int (*)(PMEMoid, uint64_t, size_t))symbol("pmemobj_tx_add_range");
	void (*commit)(void) = (void (*)(void))symbol("pmemobj_tx_commit");
	int (*end)(void) = (int (*)(void))symbol("pmemobj_tx_end");

	PMEMobjpool *pop = strcmp(argv[2], "create") == 0 ? create(argv[1], "count", 0, 0600) : open(argv[1], "count");
	if (pop == NULL)
		fail(argv[1]);
	PMEMoid oid = get_root(pop, sizeof(struct root));
	struct root *r = direct(oid);
	if (r == NULL)
		fail("root");
	if (strcmp(argv[2], "read") == 0) {
		for (uint64_t n = r->count; n > 0 && n + SLOTS > r->count; n--) {
			if (r->slots[n % SLOTS] != n) {
				fprintf(stderr, "number %lu of %lu is %lu\n", n, r->count, r->slots[n % SLOTS]);
				return 1;
			}
		}
		printf("%lu %lu %lu\n", r->count, oid.off, oid.off + sizeof *r);
		close(pop);
		return 0;
	}
	for (;;) {
		if (write(1, ".", 1) != 1)
			return 0;
		if (begin(pop, NULL, 0) != 0)
			fail("transaction");
		uint64_t n = r->count + 1;
		if (range(oid, offsetof(struct root, count), 8) != 0 || range(oid, offsetof(struct root, slots) + 8 * (n % SLOTS), 8) != 0)
			fail("range");
		r->count = n;
		r->slots[n % SLOTS] = n;
		commit();
		if (end() != 0)
			fail("end");
	}
}
