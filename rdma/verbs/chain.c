//go:build cgo && verbs

// Posting chains and waiting for them: one crossing from Go each.

#define _GNU_SOURCE
#include "verbs.h"
#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <time.h>

int64_t q_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Posts verbs[0..n) with one doorbell, the last, which is never skipped, signaled. On error *posted says
// how many the device has taken.
int q_post(q_lane *l, int n, uint64_t sequence, int *posted)
{
	struct ibv_send_wr *before = NULL, *first = NULL;
	for (int i = 0; i < n; i++) {
		const q_verb *v = &l->verbs[i];
		struct ibv_send_wr *w = &l->wr[i];
		if (v->op == Q_SKIP)
			continue;
		if (before)
			before->next = w;
		before = w;
		if (!first)
			first = w;
		l->sge[i] = (struct ibv_sge){.addr = v->local, .length = v->len, .lkey = v->lkey};
		*w = (struct ibv_send_wr){
			.wr_id = sequence << 16 | (uint64_t)i,
			.sg_list = &l->sge[i], .num_sge = 1,
			.send_flags = (v->fence ? IBV_SEND_FENCE : 0) | (v->inlined ? IBV_SEND_INLINE : 0) |
				(i + 1 == n ? IBV_SEND_SIGNALED : 0),
		};
		switch (v->op) {
		case Q_READ:
		case Q_WRITE:
			w->opcode = v->op == Q_READ ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
			w->wr.rdma.remote_addr = v->remote;
			w->wr.rdma.rkey = v->rkey;
			break;
		case Q_FLUSH:
			*posted = 0;
			int all = q_post_flushing(l, n, sequence);
			if (!all)
				*posted = n;
			return all;
		case Q_SEND:
			w->opcode = IBV_WR_SEND;
			w->num_sge = v->len ? 1 : 0;
			break;
		default:
			w->opcode = v->op == Q_CAS ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD;
			w->wr.atomic.remote_addr = v->remote;
			w->wr.atomic.rkey = v->rkey;
			w->wr.atomic.compare_add = v->op == Q_CAS ? v->expect : v->value;
			w->wr.atomic.swap = v->value;
		}
	}
	struct ibv_send_wr *bad = NULL;
	int e = ibv_post_send(l->qp, first, &bad);
	*posted = e == 0 ? n : bad ? (int)(bad - l->wr) : 0;
	return e;
}

int q_ring(q_lane *l, uint64_t sequence, int iwarp)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = sequence << 16, .opcode = iwarp ? IBV_WR_SEND : IBV_WR_RDMA_WRITE_WITH_IMM, .send_flags = IBV_SEND_SIGNALED,
	};
	return ibv_post_send(l->qp, &wr, &bad);
}

// Completions come in the order of posting: that of a sequence stands for all before.
static int look(q_lane *l, uint64_t sequence)
{
	struct ibv_wc wc;
	for (;;) {
		if (l->done >= sequence && l->heard >= l->awaits)
			return Q_DONE;
		if (l->failed)
			return Q_FAILED;
		int n = ibv_poll_cq(l->cq, 1, &wc);
		if (n == 0)
			return Q_PENDING;
		if (n < 0)
			return Q_SYSTEM;
		if (wc.status == IBV_WC_SUCCESS && wc.wr_id & Q_MESSAGE) {
			l->heard++;
		} else if (wc.status == IBV_WC_SUCCESS) {
			l->done = wc.wr_id >> 16;
		} else {
			l->failed = wc.wr_id;
			l->status = wc.status;
			l->vendor = wc.vendor_err;
			if (!(wc.wr_id & Q_MESSAGE) && (wc.wr_id >> 16) - 1 > l->done)
				l->done = (wc.wr_id >> 16) - 1;
		}
	}
}

// Looks at the queue between two looks at the clock: an adapter answers before the
// first, and where the clock is a system call it is not asked all the time.
#define LOOKS 64

// Looks at what the connection manager has to say.
static int manager(q_lane *l)
{
	struct rdma_cm_event *e;
	int r = Q_PENDING;
	while (!r && !rdma_get_cm_event(l->events, &e)) {
		if (e->event == RDMA_CM_EVENT_DISCONNECTED)
			r = Q_GONE;
		else if (e->event == RDMA_CM_EVENT_DEVICE_REMOVAL)
			r = Q_REMOVED;
		rdma_ack_cm_event(e);
	}
	return r;
}

// Looks for spin_ns; Q_PENDING if nothing has come by then: q_poll goes on.
int q_wait(q_lane *l, uint64_t sequence, int64_t spin_ns, int64_t limit_ns)
{
	int r;
	int64_t start = 0;
	for (;;) {
		for (int i = 0; i < LOOKS; i++)
			if ((r = look(l, sequence)))
				return r;
		int64_t t = q_now();
		if (!start)
			start = t;
		if (t - start >= limit_ns)
			return Q_TIMEOUT;
		if (t - start >= spin_ns)
			return Q_PENDING;
	}
}

int q_poll(q_lane *l, uint64_t sequence)
{
	int r;
	for (;;) {
		if (ibv_req_notify_cq(l->cq, 0))
			return Q_SYSTEM;
		if ((r = look(l, sequence)))
			return r;
		struct epoll_event ev[3];
		int n = epoll_wait(l->epoll, ev, 3, 0), socket = 0, events = 0;
		if (n < 0 && errno != EINTR)
			return Q_SYSTEM;
		// The poller tells only of what comes later, so nothing may be left.
		if (n == 0)
			return Q_PENDING;
		for (int i = 0; i < n; i++) {
			struct ibv_cq *cq;
			void *context;
			switch (ev[i].data.fd) {
			case Q_ON_CHANNEL:
				if (!ibv_get_cq_event(l->channel, &cq, &context))
					ibv_ack_cq_events(cq, 1);
				break;
			case Q_ON_SOCKET:
				socket = 1;
				break;
			default:
				events = 1;
			}
		}
		if ((r = look(l, sequence)))
			return r;
		if (socket)
			return Q_SOCKET;
		if (events && (r = manager(l)))
			return r;
	}
}

// Posts and waits: one crossing for a chain that is alone.
int q_once(q_lane *l, int n, uint64_t sequence, int *posted, int64_t spin_ns, int64_t limit_ns)
{
	int e = q_post(l, n, sequence, posted);
	return e ? -e : q_wait(l, sequence, spin_ns, limit_ns);
}

int q_drains_wait(struct ibv_comp_channel *ch, struct ibv_cq *cq, int wake, q_completion *out, int max)
{
	struct ibv_wc wc[16];
	for (;;) {
		if (ibv_req_notify_cq(cq, 0))
			return -EIO;
		int n = ibv_poll_cq(cq, max < 16 ? max : 16, wc);
		if (n < 0)
			return -EIO;
		if (n > 0) {
			for (int i = 0; i < n; i++)
				out[i] = (q_completion){.id = wc[i].wr_id, .status = wc[i].status, .bytes = wc[i].byte_len,
					.rings = wc[i].status == IBV_WC_SUCCESS && wc[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM};
			return n;
		}
		struct pollfd p[2] = {{.fd = ch->fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
		if (poll(p, 2, -1) < 0 && errno != EINTR)
			return -errno;
		if (p[1].revents)
			return 0;
		if (p[0].revents) {
			struct ibv_cq *got;
			void *context;
			if (!ibv_get_cq_event(ch, &got, &context))
				ibv_ack_cq_events(got, 1);
		}
	}
}
