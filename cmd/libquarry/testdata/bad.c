/* Every argument that a call refuses: each must be answered QUARRY_NOT_DONE with its reason, and change nothing. */
#include <quarry.h>
#include <stdio.h>
#include <string.h>

/* The layout of structs is part of the interface. */
_Static_assert(sizeof(quarry_error) == 256, "quarry_error");
_Static_assert(sizeof(quarry_ref) == 16, "quarry_ref");
_Static_assert(sizeof(quarry_info) == 24, "quarry_info");
_Static_assert(sizeof(quarry_options) == 72 && offsetof(quarry_options, timeout_ms) == 48, "quarry_options");
_Static_assert(sizeof(quarry_alloc_options) == 32 && offsetof(quarry_alloc_options, tag) == 16, "quarry_alloc_options");

static quarry_error err;
static int failed;

#define REFUSED(why, call)                                                                            \
	do {                                                                                          \
		int a_ = (call);                                                                      \
		if (a_ != QUARRY_NOT_DONE || err.reason != (why) || err.text[0] == 0) {               \
			printf("%s: answer %d, reason %d (%s)\n", #call, a_, err.reason, err.text);   \
			failed = 1;                                                                   \
		}                                                                                     \
	} while (0)
#define DONE(call)                                                                                    \
	do {                                                                                          \
		int a_ = (call);                                                                      \
		if (a_ != QUARRY_DONE || err.reason != QUARRY_NONE || err.text[0] != 0) {             \
			printf("%s: answer %d, reason %d (%s)\n", #call, a_, err.reason, err.text);   \
			failed = 1;                                                                   \
		}                                                                                     \
	} while (0)

static int64_t negative(void *u, const void *old, size_t n, void *next, size_t room) {
	(void)u, (void)old, (void)n, (void)next, (void)room;
	return -1;
}
static int64_t too_long(void *u, const void *old, size_t n, void *next, size_t room) {
	(void)u, (void)old, (void)n, (void)next;
	return (int64_t)room + 1;
}
static int stop(void *u, const void *k, size_t kn, const void *v, size_t n, uint64_t version) {
	(void)u, (void)k, (void)kn, (void)v, (void)n, (void)version;
	return 1;
}
static void take(void *answers, size_t i, int answer, const void *p, size_t n, const quarry_error *e) {
	(void)p, (void)n;
	((int *)answers)[i] = answer == QUARRY_DONE ? 0 : e->reason;
}

int main(void) {
	quarry_client c = 0, other;
	quarry_tree t = 0;
	quarry_ref ref, none = {0, 0}, wild = {~0ull, ~0ull};
	char buffer[64];
	size_t n = 0;
	uint64_t version = 0;
	quarry_info info;

	quarry_options o;
	memset(&o, 0, sizeof o);
	REFUSED(QUARRY_ARGUMENT, quarry_connect(&o, &c, &err)); /* bytes is 0 */
	o.bytes = sizeof o;
	o.replicas = 9;
	REFUSED(QUARRY_ARGUMENT, quarry_connect(&o, &c, &err));
	o.replicas = 0, o.lanes = 257;
	REFUSED(QUARRY_ARGUMENT, quarry_connect(&o, &c, &err));
	o.lanes = 0, o.durability = 3;
	REFUSED(QUARRY_ARGUMENT, quarry_connect(&o, &c, &err));
	o.durability = 0, o.transport = "pigeon";
	REFUSED(QUARRY_ARGUMENT, quarry_connect(&o, &c, &err));
	o.transport = NULL, o.reserved = 1;
	REFUSED(QUARRY_ARGUMENT, quarry_connect(&o, &c, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_connect(NULL, NULL, &err));
	o.reserved = 0, o.controllers = "http://127.0.0.1:1", o.timeout_ms = 50;
	REFUSED(QUARRY_UNREACHABLE, quarry_connect(&o, &c, &err));
	DONE(quarry_connect(NULL, &c, &err));

	/* Handles. */
	REFUSED(QUARRY_CLOSED, quarry_free(0, none, &err));
	REFUSED(QUARRY_CLOSED, quarry_free(c + 1, none, &err));
	REFUSED(QUARRY_CLOSED, quarry_free(~0ull, none, &err));
	REFUSED(QUARRY_CLOSED, quarry_tree_close(c, &err)); /* a client is no tree */
	DONE(quarry_tree_open(c, "bad", QUARRY_TREE_NEW, &t, &err));
	REFUSED(QUARRY_CLOSED, quarry_free((quarry_client)t, none, &err));
	REFUSED(QUARRY_EXISTS, quarry_tree_open(c, "bad", QUARRY_TREE_NEW, &t, &err));
	if (t != 0) {
		printf("a tree that was not opened has a handle\n");
		failed = 1;
	}
	DONE(quarry_tree_open(c, "bad", 0, &t, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_tree_open(c, "bad", 7, &t, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_tree_open(c, NULL, 0, &t, &err));
	REFUSED(QUARRY_NOT_FOUND, quarry_tree_open(c, "nothing", 0, &t, &err));
	DONE(quarry_tree_open(c, "bad", QUARRY_TREE_CREATE, &t, &err));

	/* Objects. */
	REFUSED(QUARRY_ARGUMENT, quarry_alloc(c, NULL, 1, NULL, &ref, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_alloc(c, "x", 1, NULL, NULL, &err));
	REFUSED(QUARRY_TOO_LARGE, quarry_alloc(c, "x", QUARRY_MAX_OBJECT_BYTES + 1ull, NULL, &ref, &err));
	quarry_alloc_options a;
	memset(&a, 0, sizeof a);
	REFUSED(QUARRY_ARGUMENT, quarry_alloc(c, "x", 1, &a, &ref, &err));
	a.bytes = sizeof a, a.capacity = ~0ull;
	REFUSED(QUARRY_TOO_LARGE, quarry_alloc(c, "x", 1, &a, &ref, &err));
	a.capacity = 0, a.tag = 1u << 18;
	REFUSED(QUARRY_ARGUMENT, quarry_alloc(c, "x", 1, &a, &ref, &err));
	a.tag = 0, a.write_once = 2;
	REFUSED(QUARRY_ARGUMENT, quarry_alloc(c, "x", 1, &a, &ref, &err));
	a.write_once = 1, a.tag = 77;
	DONE(quarry_alloc(c, "once", 4, &a, &ref, &err));
	DONE(quarry_stat(c, ref, &info, &err));
	if (info.tag != 77 || info.write_once != 1 || info.bytes != 4 || info.version != 1) {
		printf("stat: tag %u, write_once %u, bytes %llu, version %llu\n", info.tag, info.write_once, (unsigned long long)info.bytes, (unsigned long long)info.version);
		failed = 1;
	}
	REFUSED(QUARRY_ARGUMENT, quarry_stat(c, ref, NULL, &err));
	REFUSED(QUARRY_IMMUTABLE, quarry_write(c, ref, "more", 4, &err));
	DONE(quarry_free(c, ref, &err));
	DONE(quarry_alloc(c, "hello", 5, NULL, &ref, &err));
	REFUSED(QUARRY_BUFFER, quarry_read(c, ref, buffer, 4, &n, NULL, &err));
	if (n != 5) {
		printf("a buffer that is too small: length %zu\n", n);
		failed = 1;
	}
	REFUSED(QUARRY_BUFFER, quarry_read(c, ref, NULL, 0, NULL, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_read(c, ref, NULL, 5, &n, NULL, &err));
	DONE(quarry_read_at(c, ref, 3, buffer, sizeof buffer, &n, &err));
	if (n != 2 || memcmp(buffer, "lo", 2)) {
		printf("read at: length %zu\n", n);
		failed = 1;
	}
	REFUSED(QUARRY_BAD_REF, quarry_read(c, none, buffer, sizeof buffer, &n, NULL, &err));
	REFUSED(QUARRY_BAD_REF, quarry_read(c, wild, buffer, sizeof buffer, &n, NULL, &err));
	REFUSED(QUARRY_CONFLICT, quarry_write_if(c, ref, 9, "late", 4, &err));
	REFUSED(QUARRY_CONFLICT, quarry_free_if(c, ref, 9, &err));
	REFUSED(QUARRY_TOO_LARGE, quarry_write(c, ref, (char[4096]){0}, 4096, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_update(c, ref, 8, NULL, NULL, &err));
	REFUSED(QUARRY_STOPPED, quarry_update(c, ref, 8, negative, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_update(c, ref, 8, too_long, NULL, &err));
	REFUSED(QUARRY_TOO_LARGE, quarry_update(c, ref, (size_t)1 << 60, negative, NULL, &err));
	DONE(quarry_read(c, ref, buffer, sizeof buffer, &n, &info, &err));
	if (n != 5 || memcmp(buffer, "hello", 5) || info.version != 1) {
		printf("a refused call has changed the object\n");
		failed = 1;
	}

	/* Many. */
	quarry_ref two[2] = {ref, wild};
	int answers[2] = {9, 9};
	REFUSED(QUARRY_BAD_REF, quarry_read_many(c, two, 2, take, answers, &err));
	if (answers[0] != 0 || answers[1] != QUARRY_BAD_REF) {
		printf("read_many: %d, %d\n", answers[0], answers[1]);
		failed = 1;
	}
	REFUSED(QUARRY_ARGUMENT, quarry_read_many(c, two, 2, NULL, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_read_many(c, NULL, 2, take, answers, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_read_many(c, two, (size_t)1 << 60, take, answers, &err));
	const void *payloads[2] = {"HELLO", NULL};
	size_t lengths[2] = {5, 5};
	REFUSED(QUARRY_ARGUMENT, quarry_write_many(c, two, payloads, lengths, 2, answers, &err));
	payloads[1] = "?";
	lengths[1] = 1;
	REFUSED(QUARRY_BAD_REF, quarry_write_many(c, two, payloads, lengths, 2, answers, &err));
	if (answers[0] != QUARRY_DONE || answers[1] != QUARRY_NOT_DONE) {
		printf("write_many: %d, %d\n", answers[0], answers[1]);
		failed = 1;
	}
	DONE(quarry_read_many(c, NULL, 0, take, answers, &err));
	DONE(quarry_free_many(c, &ref, 1, answers, &err));
	REFUSED(QUARRY_FREED, quarry_free(c, ref, &err));

	/* Names. */
	REFUSED(QUARRY_ARGUMENT, quarry_name_create(c, "", "object", ref, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_name_create(c, "x", NULL, ref, NULL, &err));
	DONE(quarry_name_create(c, "bad/name", "object", ref, &version, &err));
	REFUSED(QUARRY_EXISTS, quarry_name_create(c, "bad/name", "object", ref, NULL, &err));
	REFUSED(QUARRY_NOT_FOUND, quarry_name_lookup(c, "no/name", NULL, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_name_swap(c, "bad/name", ref, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_name_list(c, "", "", NULL, NULL, &err));
	uint64_t late = version - 1;
	REFUSED(QUARRY_CONFLICT, quarry_name_swap(c, "bad/name", ref, &late, &err));
	DONE(quarry_name_swap(c, "bad/name", ref, &version, &err));
	DONE(quarry_name_delete(c, "bad/name", version, &err));

	/* Trees. */
	REFUSED(QUARRY_NOT_FOUND, quarry_get(t, "k", 1, buffer, sizeof buffer, &n, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_get(t, NULL, 1, buffer, sizeof buffer, &n, NULL, &err));
	DONE(quarry_put_new(t, "k", 1, "v", 1, &version, &err));
	REFUSED(QUARRY_EXISTS, quarry_put_new(t, "k", 1, "w", 1, NULL, &err));
	late = version + 1;
	REFUSED(QUARRY_CONFLICT, quarry_put_if(t, "k", 1, "w", 1, &late, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_put_if(t, "k", 1, "w", 1, NULL, &err));
	REFUSED(QUARRY_CONFLICT, quarry_delete_if(t, "k", 1, late, &err));
	REFUSED(QUARRY_STOPPED, quarry_scan(t, "", 0, NULL, 0, 0, 0, stop, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_scan(t, "", 0, NULL, 0, 0, 2, stop, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_scan(t, "", 0, NULL, 0, 0, 0, NULL, NULL, &err));
	REFUSED(QUARRY_ARGUMENT, quarry_scan(t, "", 0, NULL, 0, ~0ull, 0, stop, NULL, &err));
	DONE(quarry_put_if(t, "k", 1, "w", 1, &version, &err));
	DONE(quarry_delete_if(t, "k", 1, version, &err));
	REFUSED(QUARRY_NOT_FOUND, quarry_delete(t, "k", 1, &err));
	DONE(quarry_tree_drop(t, &err));
	REFUSED(QUARRY_CLOSED, quarry_get(t, "k", 1, buffer, sizeof buffer, &n, NULL, &err));

	/* A tree's handle ends with its client's, and NULL for err is accepted everywhere. */
	DONE(quarry_connect(NULL, &other, &err));
	DONE(quarry_tree_open(other, "bad", QUARRY_TREE_CREATE, &t, &err));
	if (quarry_get(t, "k", 1, buffer, sizeof buffer, &n, NULL, NULL) != QUARRY_NOT_DONE)
		failed = 1;
	DONE(quarry_close(other, &err));
	REFUSED(QUARRY_CLOSED, quarry_get(t, "k", 1, buffer, sizeof buffer, &n, NULL, &err));
	REFUSED(QUARRY_CLOSED, quarry_close(other, &err));
	DONE(quarry_close(c, &err));
	puts(failed ? "FAILED" : "refused");
	return failed;
}
