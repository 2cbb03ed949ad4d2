/* Reads argv[1] times an object of 128 bytes, whose reference in hex is argv[2] and argv[3], and prints the
 * median of nanoseconds a read over 100 slices. */
#include <quarry.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int rising(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(int argc, char **argv) {
	quarry_error err;
	quarry_client client;
	char buffer[128];
	size_t bytes;
	double took[100];
	if (argc != 4)
		return 2;
	int each = atoi(argv[1]) / 100;
	quarry_ref ref = {strtoull(argv[2], NULL, 16), strtoull(argv[3], NULL, 16)};
	if (quarry_connect(NULL, &client, &err)) {
		fprintf(stderr, "%s\n", err.text);
		return 1;
	}
	for (int s = 0; s < 100; s++) {
		struct timespec a, b;
		clock_gettime(CLOCK_MONOTONIC, &a);
		for (int i = 0; i < each; i++)
			if (quarry_read(client, ref, buffer, sizeof buffer, &bytes, NULL, &err)) {
				fprintf(stderr, "%s\n", err.text);
				return 1;
			}
		clock_gettime(CLOCK_MONOTONIC, &b);
		took[s] = ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / each;
	}
	qsort(took, 100, sizeof *took, rising);
	printf("%.1f\n", took[50]);
	return quarry_close(client, &err);
}
