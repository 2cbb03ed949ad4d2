//go:build cgo && verbs && yardstick

#include "verbs.h"

// Posts what is written down and polls for its completion with nothing around it, as
// perftest does; nanoseconds, or -1.
int64_t q_bare(q_lane *l, int n, uint64_t sequence)
{
	int posted;
	struct ibv_wc wc;
	int64_t start = q_now();
	if (q_post(l, n, sequence, &posted))
		return -1;
	for (;;) {
		int done = ibv_poll_cq(l->cq, 1, &wc);
		if (done < 0 || (done > 0 && wc.status != IBV_WC_SUCCESS))
			return -1;
		if (done > 0) {
			l->done = sequence;
			return q_now() - start;
		}
	}
}
