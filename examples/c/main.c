/* Objects, names and a tree from C. Run it while `quarry dev` runs:
 *
 *   make lib
 *   cc -o hello examples/c/main.c $(PKG_CONFIG_PATH=bin/lib pkg-config --cflags --libs quarry)
 *   ./hello
 */
#include <quarry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static quarry_error err;

/* must ends the program unless a call was done. QUARRY_UNKNOWN is an answer of its own: a real program reads to find
 * out whether the change took place. */
static void must(int answer, const char *what) {
	if (answer == QUARRY_DONE)
		return;
	fprintf(stderr, "%s: %s: %s\n", what, answer == QUARRY_UNKNOWN ? "unknown" : "not done", err.text);
	exit(1);
}

/* add_one is a quarry_edit: the payload is a number of 8 bytes. */
static int64_t add_one(void *user, const void *old, size_t bytes, void *next, size_t room) {
	uint64_t n;
	(void)user;
	if (bytes != sizeof n || room < sizeof n)
		return -1;
	memcpy(&n, old, sizeof n);
	n++;
	memcpy(next, &n, sizeof n);
	return sizeof n;
}

/* print_entry is a quarry_entry. */
static int print_entry(void *user, const void *key, size_t key_bytes, const void *value, size_t bytes, uint64_t version) {
	(void)user;
	(void)version;
	printf("%.*s = %.*s\n", (int)key_bytes, (const char *)key, (int)bytes, (const char *)value);
	return 0;
}

int main(void) {
	quarry_client client;
	must(quarry_connect(NULL, &client, &err), "connect");

	uint64_t n = 41;
	quarry_ref ref;
	must(quarry_alloc(client, &n, sizeof n, NULL, &ref, &err), "alloc");
	must(quarry_name_create(client, "example/c", "object", ref, NULL, &err), "name");
	must(quarry_update(client, ref, sizeof n, add_one, NULL, &err), "update");
	quarry_info info;
	size_t bytes;
	must(quarry_read(client, ref, &n, sizeof n, &bytes, &info, &err), "read");
	printf("%llu at version %llu\n", (unsigned long long)n, (unsigned long long)info.version);

	/* Another writer that still believes in version 1 is refused. */
	int answer = quarry_write_if(client, ref, 1, &n, sizeof n, &err);
	printf("late: %s\n", answer == QUARRY_NOT_DONE && err.reason == QUARRY_CONFLICT ? "conflict" : "?");
	must(quarry_name_delete(client, "example/c", 0, &err), "delete the name");
	must(quarry_free(client, ref, &err), "free");

	quarry_tree tree;
	must(quarry_tree_open(client, "example-c", QUARRY_TREE_CREATE, &tree, &err), "open the tree");
	must(quarry_put(tree, "ada", 3, "king", 4, &err), "put");
	must(quarry_put(tree, "alan", 4, "turing", 6, &err), "put");
	must(quarry_scan(tree, "a", 1, NULL, 0, 0, 0, print_entry, NULL, &err), "scan");
	must(quarry_tree_drop(tree, &err), "drop");
	must(quarry_close(client, &err), "close");
	return 0;
}
