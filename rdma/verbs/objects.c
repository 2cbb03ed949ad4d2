//go:build cgo && verbs

// Making and dropping of verbs objects; each is counted.

#include "verbs.h"
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

q_objects q_live;

void q_count(q_objects *out)
{
	out->contexts = __atomic_load_n(&q_live.contexts, __ATOMIC_RELAXED);
	out->pds = __atomic_load_n(&q_live.pds, __ATOMIC_RELAXED);
	out->mrs = __atomic_load_n(&q_live.mrs, __ATOMIC_RELAXED);
	out->cqs = __atomic_load_n(&q_live.cqs, __ATOMIC_RELAXED);
	out->channels = __atomic_load_n(&q_live.channels, __ATOMIC_RELAXED);
	out->qps = __atomic_load_n(&q_live.qps, __ATOMIC_RELAXED);
	out->ids = __atomic_load_n(&q_live.ids, __ATOMIC_RELAXED);
	out->windows = __atomic_load_n(&q_live.windows, __ATOMIC_RELAXED);
	out->event_channels = __atomic_load_n(&q_live.event_channels, __ATOMIC_RELAXED);
}

struct ibv_context *q_open(struct ibv_device *d)
{
	struct ibv_context *ctx = ibv_open_device(d);
	if (ctx) {
		Q_BORN(contexts);
		fcntl(ctx->async_fd, F_SETFL, fcntl(ctx->async_fd, F_GETFL) | O_NONBLOCK);
	}
	return ctx;
}

int q_async(struct ibv_context *ctx)
{
	struct ibv_async_event e;
	errno = 0;
	if (ibv_get_async_event(ctx, &e))
		return errno ? -errno : -EIO;
	ibv_ack_async_event(&e); // at once: destroying the object waits for it
	return e.event_type;
}

int q_close(struct ibv_context *ctx)
{
	int e = ibv_close_device(ctx);
	if (!e)
		Q_DIED(contexts);
	return e;
}

int q_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out)
{
	return ibv_query_port(ctx, port, out);
}

int q_has_pkey(struct ibv_context *ctx, uint8_t port, uint16_t pkey, int entries)
{
	for (int i = 0; i < entries; i++) {
		__be16 key;
		if (!ibv_query_pkey(ctx, port, i, &key) && ((be16toh(key) ^ pkey) & 0x7fff) == 0)
			return 1;
	}
	return 0;
}

struct ibv_pd *q_pd(struct ibv_context *ctx)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	if (pd)
		Q_BORN(pds);
	return pd;
}

int q_free_pd(struct ibv_pd *pd)
{
	int e = ibv_dealloc_pd(pd);
	if (!e)
		Q_DIED(pds);
	return e;
}

struct ibv_mr *q_register(struct ibv_pd *pd, void *addr, uint64_t bytes, uint64_t base, int access)
{
	struct ibv_mr *mr = ibv_reg_mr_iova(pd, addr, bytes, base, access);
	if (mr)
		Q_BORN(mrs);
	return mr;
}

int q_deregister(struct ibv_mr *mr)
{
	int e = ibv_dereg_mr(mr);
	if (!e)
		Q_DIED(mrs);
	return e;
}

// Why a call of the library has failed: not every one says so, and 0 is success.
static int failed(void) { return errno ? errno : EIO; }

// Completion queue with a channel whose descriptor never blocks.
static int queue(struct ibv_context *ctx, int entries, uint32_t vector, struct ibv_comp_channel **ch, struct ibv_cq **cq)
{
	errno = 0;
	if (!(*ch = ibv_create_comp_channel(ctx)))
		return failed();
	Q_BORN(channels);
	fcntl((*ch)->fd, F_SETFL, fcntl((*ch)->fd, F_GETFL) | O_NONBLOCK);
	if (!(*cq = ibv_create_cq(ctx, entries, NULL, *ch, ctx->num_comp_vectors > 1 ? (int)(vector % (uint32_t)ctx->num_comp_vectors) : 0))) {
		int e = failed();
		if (!ibv_destroy_comp_channel(*ch))
			Q_DIED(channels);
		*ch = NULL;
		return e;
	}
	Q_BORN(cqs);
	return 0;
}

static int unqueue(struct ibv_comp_channel *ch, struct ibv_cq *cq)
{
	int e = ibv_destroy_cq(cq);
	if (e)
		return e;
	Q_DIED(cqs);
	if ((e = ibv_destroy_comp_channel(ch)))
		return e;
	Q_DIED(channels);
	return 0;
}

int q_drains_open(struct ibv_context *ctx, int entries, uint32_t vector, struct ibv_comp_channel **ch, struct ibv_cq **cq)
{
	return queue(ctx, entries, vector, ch, cq);
}

int q_drains_close(struct ibv_comp_channel *ch, struct ibv_cq *cq) { return unqueue(ch, cq); }

int q_destroy_qp(struct ibv_qp *qp)
{
	int e = ibv_destroy_qp(qp);
	if (!e)
		Q_DIED(qps);
	return e;
}

static struct ibv_qp *queue_pair(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t send, uint32_t recv, uint32_t *inline_max)
{
	struct ibv_qp_init_attr a = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = send, .max_recv_wr = recv, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = *inline_max},
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &a);
	if (!qp && a.cap.max_inline_data) { // a device without inline data says so by failing
		a.cap.max_inline_data = 0;
		errno = 0; // what the first try said is not why the second one fails
		qp = ibv_create_qp(pd, &a);
	}
	if (qp) {
		Q_BORN(qps);
		*inline_max = a.cap.max_inline_data;
	}
	return qp;
}

struct ibv_qp *q_responder(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t receives)
{
	uint32_t none = 0;
	return queue_pair(pd, cq, 2, receives, &none);
}

int q_lane_open(struct ibv_context *ctx, struct ibv_pd *pd, const q_lane_want *want, q_lane **out)
{
	q_lane *l = calloc(1, sizeof *l);
	if (!l)
		return ENOMEM;
	// Every work request may complete with an error.
	int e = queue(ctx, (int)want->depth + 1, want->vector, &l->channel, &l->cq);
	if (e) {
		free(l);
		return e;
	}
	l->socket = l->epoll = -1;
	l->depth = want->depth;
	l->inline_max = want->inline_max;
	if (want->flush && (l->qp = q_flushing(pd, l->cq, l->depth, 1, &l->inline_max, &l->flushes)))
		Q_BORN(qps);
	if (!l->qp && !(l->qp = queue_pair(pd, l->cq, l->depth, 1, &l->inline_max))) {
		e = failed();
		unqueue(l->channel, l->cq);
		free(l);
		return e;
	}
	if (l->inline_max > want->inline_max)
		l->inline_max = want->inline_max;
	*out = l;
	return 0;
}

int q_lane_close(q_lane *l)
{
	int e = 0;
	if (l->qp && (e = q_destroy_qp(l->qp)))
		return e;
	l->qp = NULL;
	// Tells the node, should the socket not.
	if (l->id && (e = q_drop(l->id)))
		return e;
	l->id = NULL;
	if (l->events) {
		rdma_destroy_event_channel(l->events);
		Q_DIED(event_channels);
	}
	l->events = NULL;
	if ((e = unqueue(l->channel, l->cq)))
		return e;
	free(l);
	return 0;
}

struct ibv_mw *q_window(struct ibv_pd *pd)
{
	struct ibv_mw *w = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (w)
		Q_BORN(windows);
	return w;
}

int q_free_window(struct ibv_mw *w)
{
	int e = ibv_dealloc_mw(w);
	if (!e)
		Q_DIED(windows);
	return e;
}

int q_bind(struct ibv_qp *qp, struct ibv_mw *w, struct ibv_mr *mr, uint32_t rkey, uint64_t off, uint64_t bytes, int access, uint64_t id)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = id, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
		.bind_mw = {.mw = w, .rkey = rkey, .bind_info = {.mr = mr, .addr = off, .length = bytes, .mw_access_flags = access}},
	};
	int e = ibv_post_send(qp, &wr, &bad);
	if (!e)
		w->rkey = rkey; // no provider does it for a bind that was posted
	return e;
}

int q_invalidate(struct ibv_qp *qp, uint32_t rkey, uint64_t id)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = id, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey,
	};
	return ibv_post_send(qp, &wr, &bad);
}

int q_receive(struct ibv_qp *qp, uint64_t id, void *to, uint32_t bytes, uint32_t lkey)
{
	struct ibv_sge sge = {.addr = (uintptr_t)to, .length = bytes, .lkey = lkey};
	struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = bytes ? 1 : 0}, *bad;
	return ibv_post_recv(qp, &wr, &bad);
}

int q_send(struct ibv_qp *qp, uint64_t id, const void *from, uint32_t bytes, uint32_t lkey)
{
	struct ibv_sge sge = {.addr = (uintptr_t)from, .length = bytes, .lkey = lkey};
	struct ibv_send_wr *bad, wr = {.wr_id = id, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1};
	return ibv_post_send(qp, &wr, &bad);
}

int q_init(struct ibv_qp *qp, uint8_t port, int access)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = port, .qp_access_flags = access};
	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int q_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

int q_state(struct ibv_qp *qp)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	return ibv_query_qp(qp, &a, IBV_QP_STATE, &i) ? -1 : (int)a.qp_state;
}

int q_query(struct ibv_qp *qp, q_settings *out)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	int e = ibv_query_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_AV | IBV_QP_PATH_MTU |
		IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &i);
	if (!e)
		*out = (q_settings){
			.state = a.qp_state, .reads_out = a.max_rd_atomic, .reads_in = a.max_dest_rd_atomic, .timeout = a.timeout,
			.retries = a.retry_cnt, .rnr_retries = a.rnr_retry, .service_level = a.ah_attr.sl,
			.traffic_class = a.ah_attr.grh.traffic_class, .pkey_index = a.pkey_index,
			.mtu_bytes = 128 << a.path_mtu, .access = a.qp_access_flags,
		};
	return e;
}
