/* Threads that share one client: argv[1] threads add 1 to a counter argv[2] times each, and print its end.
 * With argv[3] they put keys into one tree instead, and print how many it has. */
#include <pthread.h>
#include <quarry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static quarry_client client;
static quarry_ref counter;
static quarry_tree tree;
static int times, keys;

static int64_t add_one(void *user, const void *old, size_t bytes, void *next, size_t room) {
	uint64_t n;
	(void)user, (void)room;
	if (bytes != sizeof n)
		return -1;
	memcpy(&n, old, sizeof n);
	n++;
	memcpy(next, &n, sizeof n);
	return sizeof n;
}

static void must(int answer, quarry_error *err) {
	if (answer != QUARRY_DONE) {
		fprintf(stderr, "answer %d, reason %d: %s\n", answer, err->reason, err->text);
		exit(1);
	}
}

static void *work(void *arg) {
	quarry_error err;
	char key[32];
	for (int i = 0; i < times; i++) {
		if (keys) {
			int n = snprintf(key, sizeof key, "%d/%d", (int)(size_t)arg, i);
			must(quarry_put(tree, key, (size_t)n, key, (size_t)n, &err), &err);
			continue;
		}
		int a;
		do
			a = quarry_update(client, counter, 8, add_one, NULL, &err);
		while (a == QUARRY_NOT_DONE && err.reason == QUARRY_BUSY);
		must(a, &err);
	}
	return NULL;
}

static int count(void *n, const void *k, size_t kn, const void *v, size_t vn, uint64_t version) {
	(void)version;
	if (kn != vn || memcmp(k, v, kn))
		return 1;
	++*(int *)n;
	return 0;
}

int main(int argc, char **argv) {
	quarry_error err;
	pthread_t threads[64];
	uint64_t n = 0;
	size_t bytes;
	if (argc < 3 || atoi(argv[1]) > 64)
		return 2;
	times = atoi(argv[2]), keys = argc > 3;
	must(quarry_connect(NULL, &client, &err), &err);
	must(quarry_alloc(client, &n, sizeof n, NULL, &counter, &err), &err);
	must(quarry_tree_open(client, "threads", QUARRY_TREE_NEW, &tree, &err), &err);
	for (int i = 0; i < atoi(argv[1]); i++)
		pthread_create(&threads[i], NULL, work, (void *)(size_t)i);
	for (int i = 0; i < atoi(argv[1]); i++)
		pthread_join(threads[i], NULL);
	if (keys) {
		int all = 0;
		must(quarry_scan(tree, NULL, 0, NULL, 0, 0, 0, count, &all, &err), &err);
		printf("%d\n", all);
	} else {
		must(quarry_read(client, counter, &n, sizeof n, &bytes, NULL, &err), &err);
		printf("%llu\n", (unsigned long long)n);
	}
	must(quarry_tree_drop(tree, &err), &err);
	must(quarry_free(client, counter, &err), &err);
	must(quarry_close(client, &err), &err);
	return 0;
}
