//go:build cgo && verbs

// Connecting queue pairs through librdmacm. The kernel finds device, route, path MTU
// and the numbers of both ends; the queue pairs are ours: the manager's own would be in
// protection domains of its own, and nobody could wait for their drain.

#define _GNU_SOURCE
#include "verbs.h"
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/ib.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>

static void address(struct sockaddr_storage *s, const q_addr *a)
{
	static const uint8_t mapped[12] = {[10] = 0xff, 0xff};
	memset(s, 0, sizeof *s);
	if (a->infiniband) {
		struct sockaddr_ib *ib = (struct sockaddr_ib *)s;
		ib->sib_family = AF_IB;
		ib->sib_pkey = htons(a->pkey ? a->pkey : 0xffff);
		memcpy(&ib->sib_addr, a->gid, 16);
		ib->sib_sid = htobe64(RDMA_IB_IP_PS_TCP | a->port);
		ib->sib_sid_mask = htobe64(RDMA_IB_IP_PS_MASK | (a->port ? RDMA_IB_IP_PORT_MASK : 0));
	} else if (!memcmp(a->gid, mapped, sizeof mapped)) {
		struct sockaddr_in *in = (struct sockaddr_in *)s;
		in->sin_family = AF_INET;
		in->sin_port = htons(a->port);
		memcpy(&in->sin_addr, a->gid + 12, 4);
	} else {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)s;
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(a->port);
		memcpy(&in6->sin6_addr, a->gid, 16);
		if (a->gid[0] == 0xfe && (a->gid[1] & 0xc0) == 0x80)
			in6->sin6_scope_id = a->scope;
	}
}

static int failed(void) { return errno ? errno : EIO; }

static int open_events(struct rdma_event_channel **out)
{
	errno = 0;
	if (!(*out = rdma_create_event_channel()))
		return failed();
	Q_BORN(event_channels);
	fcntl((*out)->fd, F_SETFL, fcntl((*out)->fd, F_GETFL) | O_NONBLOCK);
	return 0;
}

static void close_events(struct rdma_event_channel *events)
{
	rdma_destroy_event_channel(events);
	Q_DIED(event_channels);
}

int q_manager(void)
{
	struct rdma_event_channel *events;
	int e = open_events(&events);
	if (!e)
		close_events(events);
	return e;
}

int q_drop(struct rdma_cm_id *id)
{
	if (rdma_destroy_id(id))
		return failed();
	Q_DIED(ids);
	return 0;
}

// The attributes that the manager has found for a state; rights, timeouts and classes are ours.
static int move(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state, int access, uint8_t reads, const q_link *link)
{
	struct ibv_qp_attr a = {.qp_state = state};
	int mask = 0;
	if (rdma_init_qp_attr(id, &a, &mask))
		return failed();
	switch (state) {
	case IBV_QPS_INIT:
		a.qp_access_flags = access;
		mask |= IBV_QP_ACCESS_FLAGS;
		break;
	case IBV_QPS_RTR:
		if (a.max_dest_rd_atomic > reads)
			a.max_dest_rd_atomic = reads;
		a.min_rnr_timer = 12;
		if (link->traffic_class && a.ah_attr.is_global)
			a.ah_attr.grh.traffic_class = link->traffic_class;
		if (link->service_level)
			a.ah_attr.sl = link->service_level;
		break;
	default:
		a.timeout = link->timeout;
		a.retry_cnt = link->retries;
		a.rnr_retry = 6; // 7 would mean for ever
		if (a.max_rd_atomic > reads)
			a.max_rd_atomic = reads;
	}
	return ibv_modify_qp(qp, &a, mask);
}

static int same_device(struct rdma_cm_id *id, struct ibv_context *ctx, uint8_t port)
{
	return id->verbs && id->port_num == port &&
		!strcmp(ibv_get_device_name(id->verbs->device), ibv_get_device_name(ctx->device));
}

// Waits for an event of a lane that is being connected.
static int await(q_lane *l, enum rdma_cm_event_type want, int64_t end, q_failure *why)
{
	for (;;) {
		struct rdma_cm_event *e;
		if (!rdma_get_cm_event(l->events, &e)) {
			why->event = e->event;
			why->status = e->status;
			rdma_ack_cm_event(e);
			return why->event == (int)want ? Q_DONE : Q_FAILED;
		}
		if (errno != EAGAIN && errno != EINTR) {
			why->error = failed();
			return Q_SYSTEM;
		}
		int64_t left = (end - q_now()) / 1000000;
		if (left <= 0)
			return Q_TIMEOUT;
		struct pollfd p[2] = {{.fd = l->events->fd, .events = POLLIN}, {.fd = l->socket, .events = POLLIN | POLLRDHUP}};
		if (poll(p, 2, left < 1000 ? (int)left : 1000) < 0 && errno != EINTR) {
			why->error = failed();
			return Q_SYSTEM;
		}
		if (p[1].revents && !p[0].revents)
			return Q_SOCKET;
	}
}

int q_lane_connect(q_lane *l, const q_addr *from, const q_addr *to, uint8_t port, const uint8_t *data, uint8_t len,
		   uint8_t reads, const q_link *link, int64_t limit_ns, q_failure *why)
{
	int64_t end = q_now() + limit_ns;
	int patience_ms = (int)(limit_ns / 1000000), r;
	// Neighbours that exist answer sooner; the kernel asks others without end.
	if (patience_ms > 5000)
		patience_ms = 5000;
	struct sockaddr_storage own, peer;
	address(&own, from);
	address(&peer, to);

	why->step = Q_STEP_OPEN;
	if ((why->error = open_events(&l->events)))
		return Q_SYSTEM;
	if (rdma_create_id(l->events, &l->id, NULL, RDMA_PS_TCP)) {
		why->error = failed();
		l->id = NULL;
		return Q_SYSTEM;
	}
	Q_BORN(ids);

	why->step = Q_STEP_ADDRESS;
	if (rdma_resolve_addr(l->id, (struct sockaddr *)&own, (struct sockaddr *)&peer, patience_ms)) {
		why->error = failed();
		return Q_SYSTEM;
	}
	if ((r = await(l, RDMA_CM_EVENT_ADDR_RESOLVED, end, why)) != Q_DONE)
		return r;
	why->step = Q_STEP_DEVICE;
	if (!same_device(l->id, l->qp->context, port))
		return Q_FAILED;

	why->step = Q_STEP_ROUTE;
	if (rdma_resolve_route(l->id, patience_ms)) {
		why->error = failed();
		return Q_SYSTEM;
	}
	if ((r = await(l, RDMA_CM_EVENT_ROUTE_RESOLVED, end, why)) != Q_DONE)
		return r;

	// The manager has the driver move an iWARP queue pair from INIT on. What a READ brings is a remote write to this end.
	if (from->iwarp) {
		why->step = Q_STEP_QUEUE_PAIR;
		if ((why->error = move(l->id, l->qp, IBV_QPS_INIT, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, reads, link)))
			return Q_SYSTEM;
	}

	why->step = Q_STEP_CONNECT;
	struct rdma_conn_param param = {
		.private_data = data, .private_data_len = len, .responder_resources = 1, .initiator_depth = reads,
		.retry_count = link->retries, .rnr_retry_count = 6, .qp_num = l->qp->qp_num,
	};
	if (rdma_connect(l->id, &param)) {
		why->error = failed();
		return Q_SYSTEM;
	}
	if ((r = await(l, from->iwarp ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_RESPONSE, end, why)) != Q_DONE || from->iwarp)
		return r;

	why->step = Q_STEP_QUEUE_PAIR;
	if ((why->error = move(l->id, l->qp, IBV_QPS_INIT, 0, reads, link)) ||
	    (why->error = move(l->id, l->qp, IBV_QPS_RTR, 0, reads, link)) ||
	    (why->error = move(l->id, l->qp, IBV_QPS_RTS, 0, reads, link)))
		return Q_SYSTEM;
	if (rdma_establish(l->id)) {
		why->error = failed();
		return Q_SYSTEM;
	}
	return Q_DONE;
}

int q_watch(struct ibv_context *ctx, uint8_t port, const q_addr *at, struct rdma_event_channel **events, struct rdma_cm_id **id)
{
	struct sockaddr_storage own;
	int e = open_events(events);
	if (e)
		return e;
	if (rdma_create_id(*events, id, NULL, RDMA_PS_TCP)) {
		e = failed();
		close_events(*events);
		return e;
	}
	Q_BORN(ids);
	address(&own, at);
	e = 0;
	if (rdma_bind_addr(*id, (struct sockaddr *)&own))
		e = failed();
	else if (!same_device(*id, ctx, port))
		e = EXDEV;
	if (e)
		q_listen_close(*events, *id);
	return e;
}

int q_removed(struct rdma_event_channel *events)
{
	struct rdma_cm_event *e;
	int removed = 0;
	while (!rdma_get_cm_event(events, &e)) {
		removed |= e->event == RDMA_CM_EVENT_DEVICE_REMOVAL;
		rdma_ack_cm_event(e);
	}
	return removed;
}

int q_listen(struct ibv_context *ctx, uint8_t port, q_addr *at, struct rdma_event_channel **events, struct rdma_cm_id **id)
{
	int e = q_watch(ctx, port, at, events, id);
	if (e)
		return e;
	if (rdma_listen(*id, 1024)) {
		e = failed();
		q_listen_close(*events, *id);
		return e;
	}
	at->port = ntohs(rdma_get_src_port(*id));
	return 0;
}

int q_listen_close(struct rdma_event_channel *events, struct rdma_cm_id *id)
{
	int e = q_drop(id);
	if (!e)
		close_events(events);
	return e;
}

int q_event_next(struct rdma_event_channel *events, int wake, q_event *out)
{
	for (;;) {
		struct rdma_cm_event *e;
		if (!rdma_get_cm_event(events, &e)) {
			// Acknowledged at once: who destroys an id waits for that.
			memset(out, 0, sizeof *out);
			out->lane = (uint64_t)(uintptr_t)e->id->context;
			switch (e->event) {
			case RDMA_CM_EVENT_CONNECT_REQUEST:
				Q_BORN(ids);
				out->kind = Q_EVENT_REQUEST;
				out->id = e->id;
				// An event names depths as its receiver has them: what the client wants
				// to have under way is what this end has to answer.
				out->reads = e->param.conn.responder_resources;
				out->len = e->param.conn.private_data_len < Q_PRIVATE ? e->param.conn.private_data_len : Q_PRIVATE;
				if (out->len)
					memcpy(out->data, e->param.conn.private_data, out->len);
				break;
			case RDMA_CM_EVENT_DISCONNECTED:
			case RDMA_CM_EVENT_CONNECT_ERROR:
			case RDMA_CM_EVENT_UNREACHABLE:
			case RDMA_CM_EVENT_REJECTED:
				out->kind = Q_EVENT_GONE;
				break;
			case RDMA_CM_EVENT_DEVICE_REMOVAL:
				out->kind = Q_EVENT_REMOVED;
				break;
			default:
				out->kind = Q_EVENT_OTHER;
			}
			rdma_ack_cm_event(e);
			return 1;
		}
		if (errno != EAGAIN && errno != EINTR)
			return -failed();
		struct pollfd p[2] = {{.fd = events->fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
		if (poll(p, 2, -1) < 0 && errno != EINTR)
			return -failed();
		if (p[1].revents)
			return 0;
	}
}

int q_accept(struct rdma_cm_id *id, struct ibv_qp *qp, int access, uint8_t reads, const q_link *link, uint64_t lane, int iwarp)
{
	int e;
	id->context = (void *)(uintptr_t)lane;
	if ((e = move(id, qp, IBV_QPS_INIT, access, reads, link)))
		return e;
	if (!iwarp && ((e = move(id, qp, IBV_QPS_RTR, access, reads, link)) || (e = move(id, qp, IBV_QPS_RTS, access, 1, link))))
		return e;
	struct rdma_conn_param param = {
		.responder_resources = reads, .initiator_depth = 1, .rnr_retry_count = 6, .qp_num = qp->qp_num,
	};
	return rdma_accept(id, &param) ? failed() : 0;
}

int q_reject(struct rdma_cm_id *id)
{
	rdma_reject(id, NULL, 0);
	return q_drop(id);
}
