//go:build cgo && verbs

// Native FLUSH. Headers before those of rdma-core 45 do not have it, while the library
// that the program meets when it runs may: so its few names are here as numbers, and
// whether there is one is seen from the queue pair that asks for it.

#include "verbs.h"
#include <errno.h>
#include <stddef.h>
#include <string.h>

#define WITH_FLUSH (1 << 11) // IBV_QP_EX_WITH_FLUSH
#define RANGE 0              // IBV_FLUSH_RANGE

typedef void (*flush_fn)(struct ibv_qp_ex *, uint32_t rkey, uint64_t remote, size_t len, uint8_t type, uint8_t level);

// The struct is part of the library's ABI and grows at its end: wr_abort, wr_atomic_write,
// wr_flush.
#define FLUSH_AT (offsetof(struct ibv_qp_ex, wr_abort) + 2 * sizeof(flush_fn))
_Static_assert(sizeof(flush_fn) != 8 || FLUSH_AT == 352, "offset of wr_flush, as the headers of rdma-core 56 have it");

static flush_fn flush_of(struct ibv_qp_ex *x)
{
	flush_fn f;
	memcpy(&f, (char *)x + FLUSH_AT, sizeof f);
	return f;
}

// NULL if library, kernel or device cannot. A library that does not know the flag refuses it.
struct ibv_qp *q_flushing(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t send, uint32_t recv, uint32_t *inline_max, struct ibv_qp_ex **ex)
{
	struct ibv_qp_init_attr_ex a = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = send, .max_recv_wr = recv, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = *inline_max},
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
			IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND | WITH_FLUSH,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(pd->context, &a);
	if (!qp)
		return NULL;
	*ex = ibv_qp_to_qp_ex(qp);
	if (!*ex || !flush_of(*ex)) {
		ibv_destroy_qp(qp);
		return NULL;
	}
	*inline_max = a.cap.max_inline_data;
	return qp;
}

// q_post for a chain that has a native FLUSH in it. Either all are posted or none.
int q_post_flushing(q_lane *l, int n, uint64_t sequence)
{
	struct ibv_qp_ex *x = l->flushes;
	ibv_wr_start(x);
	for (int i = 0; i < n; i++) {
		const q_verb *v = &l->verbs[i];
		if (v->op == Q_SKIP)
			continue;
		x->wr_id = sequence << 16 | (uint64_t)i;
		x->wr_flags = (v->fence ? IBV_SEND_FENCE : 0) | (i + 1 == n ? IBV_SEND_SIGNALED : 0);
		switch (v->op) {
		case Q_READ:
			ibv_wr_rdma_read(x, v->rkey, v->remote);
			break;
		case Q_WRITE:
			ibv_wr_rdma_write(x, v->rkey, v->remote);
			break;
		case Q_CAS:
			ibv_wr_atomic_cmp_swp(x, v->rkey, v->remote, v->expect, v->value);
			break;
		case Q_FAA:
			ibv_wr_atomic_fetch_add(x, v->rkey, v->remote, v->value);
			break;
		case Q_SEND:
			ibv_wr_send(x);
			break;
		case Q_FLUSH:
			flush_of(x)(x, v->rkey, v->remote, v->len, v->flush, RANGE);
			continue; // it has no local memory
		default:
			ibv_wr_abort(x);
			return EINVAL;
		}
		// Never inline: Soft-RoCE's library forgets to tell its kernel.
		ibv_wr_set_sge(x, v->lkey, v->local, v->len);
	}
	return ibv_wr_complete(x);
}
