/* A space by calls, then in memory, which a program in Go shares: it stores 7 into the second page when it sees 42 in the first. */
#include <quarry.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

static quarry_error err;

#define MUST(want, why, call)                                                                              \
	do {                                                                                               \
		int a_ = (call);                                                                           \
		if (a_ != (want) || err.reason != (why)) {                                                 \
			printf("%s: answer %d, reason %d (%s)\n", #call, a_, (int)err.reason, err.text);   \
			exit(1);                                                                           \
		}                                                                                          \
	} while (0)
#define DONE(call) MUST(QUARRY_DONE, QUARRY_NONE, call)
#define REFUSED(why, call) MUST(QUARRY_NOT_DONE, why, call)
#define CHECK(what)                                  \
	do {                                         \
		if (!(what)) {                       \
			printf("%s\n", #what);       \
			exit(1);                     \
		}                                    \
	} while (0)

static void refused(quarry_client client, quarry_space space, quarry_space_info info) {
	quarry_space none;
	quarry_mapping mapping;
	void *memory;
	char b[8];
	uint64_t v;

	REFUSED(QUARRY_CLOSED, quarry_space_open(0, "c", &none, &err));
	REFUSED(QUARRY_NOT_FOUND, quarry_space_open(client, "none", &none, &err));
	REFUSED(QUARRY_EXISTS, quarry_space_create(client, "c", 1, 0, &none, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_create(client, "d", 0, 0, &none, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_create(client, "d", 1, 4, &none, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_create(client, NULL, 1, 1, &none, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_open(client, "c", NULL, &err));
	REFUSED(QUARRY_NOT_FOUND, quarry_space_delete(client, "none", &err));
	REFUSED(QUARRY_CLOSED, quarry_space_stat(client, &info, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_stat(space, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_grow(space, 0, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_read(space, info.base - 1, b, 8, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_write(space, info.base + info.bytes - 7, b, 8, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_write(space, info.base, NULL, 8, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_load64(space, info.base + 4, &v, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_load64(space, info.base, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_space_add64(space, info.base + info.bytes, 1, NULL, &err));

	REFUSED(QUARRY_CLOSED, quarry_map(0, info.base, PAGE, QUARRY_MAP_RELEASE, &memory, &mapping, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_map(space, info.base, PAGE, 0, &memory, &mapping, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_map(space, info.base, 1, QUARRY_MAP_RELEASE, &memory, &mapping, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_map(space, info.base - PAGE, PAGE, QUARRY_MAP_RELEASE, &memory, &mapping, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_map(space, info.base, PAGE, QUARRY_MAP_RELEASE, NULL, &mapping, &err));
	REFUSED(QUARRY_CLOSED, quarry_map_sync(space, info.base, PAGE, &err));
	REFUSED(QUARRY_CLOSED, quarry_unmap(0, &err));
}

int main(void) {
	quarry_client client;
	quarry_space space;
	quarry_space_info info;
	quarry_mapping mapping, other;
	void *memory, *nothing;
	char text[13];
	uint64_t old;

	DONE(quarry_connect(NULL, &client, &err));
	DONE(quarry_space_create(client, "c", 2u << 20, 1, &space, &err));
	DONE(quarry_space_stat(space, &info, &err));
	CHECK(info.base >= 0x100000000000u && info.bytes == 2u << 20 && info.replicas == 1 && info.durable == 0);
	refused(client, space, info);
	DONE(quarry_space_write(space, info.base + 100, "virtual bytes", 13, &err));
	DONE(quarry_space_read(space, info.base + 100, text, 13, &err));
	CHECK(memcmp(text, "virtual bytes", 13) == 0);
	DONE(quarry_space_store64(space, info.base + 8, 40, &err));
	DONE(quarry_space_add64(space, info.base + 8, 1, &old, &err));
	CHECK(old == 40);
	REFUSED(QUARRY_CONFLICT, quarry_space_cas64(space, info.base + 8, 40, 50, &old, &err));
	CHECK(old == 41);
	DONE(quarry_space_cas64(space, info.base + 8, 41, 50, NULL, &err));
	DONE(quarry_space_load64(space, info.base + 8, &old, &err));
	CHECK(old == 50);

	DONE(quarry_map(space, info.base, info.bytes, QUARRY_MAP_RELEASE, &memory, &mapping, &err));
	CHECK((uint64_t)(uintptr_t)memory == info.base);
	REFUSED(QUARRY_EXISTS, quarry_map(space, info.base, PAGE, QUARRY_MAP_RELEASE, &nothing, &other, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_map_sync(mapping, info.base + info.bytes, 1, &err));
	unsigned char *m = memory;
	CHECK(memcmp(m + 100, "virtual bytes", 13) == 0);
	DONE(quarry_map_prefetch(mapping, info.base, info.bytes, &err));
	__atomic_store_n(m + 4 * PAGE, 42, __ATOMIC_RELEASE);
	puts("mapped");
	fflush(stdout);
	while (__atomic_load_n(m + 5 * PAGE, __ATOMIC_ACQUIRE) != 7)
		sched_yield();
	DONE(quarry_map_release(mapping, info.base, info.bytes, &err));
	DONE(quarry_space_read(space, info.base + 4 * PAGE, text, 1, &err));
	CHECK(text[0] == 42);
	DONE(quarry_space_write(space, info.base + 9 * PAGE, "x", 1, &err));
	DONE(quarry_map_acquire(mapping, info.base, info.bytes, &err));
	CHECK(m[9 * PAGE] == 'x');
	DONE(quarry_unmap(mapping, &err));
	REFUSED(QUARRY_CLOSED, quarry_map_sync(mapping, info.base, 1, &err));
	DONE(quarry_space_grow(space, 1, &err));
	DONE(quarry_space_close(space, &err));
	DONE(quarry_space_open(client, "c", &space, &err));
	DONE(quarry_space_delete(client, "c", &err));
	DONE(quarry_close(client, &err));
	REFUSED(QUARRY_CLOSED, quarry_space_stat(space, &info, &err));
	puts("shared");
	return 0;
}
