//go:build cgo && verbs

#ifndef QUARRY_VERBS_H
#define QUARRY_VERBS_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>

// A chain has at most this many work requests: rdma.MaxChainVerbs, and one more over iWARP.
#define Q_CHAIN 257
// Work requests of one queue pair: four full chains under way. Most begin with fewer.
#define Q_SEND_WRS 1024
// What a request to connect can carry.
#define Q_PRIVATE 56

// Q_SKIP is not posted: a later verb does its work.
enum { Q_READ = 1, Q_WRITE, Q_CAS, Q_FAA, Q_SEND, Q_FLUSH, Q_SKIP };
// Headers before rdma-core 45 have no IBV_ACCESS_FLUSH_GLOBAL and IBV_ACCESS_FLUSH_PERSISTENT, nor what a FLUSH asks for:
// IBV_FLUSH_GLOBAL, that all can see what is written, and IBV_FLUSH_PERSISTENT.
#define Q_ACCESS_FLUSH (1 << 8)
#define Q_ACCESS_PERSISTENT (1 << 9)
#define Q_VISIBLE 1
#define Q_PERSISTENT 2

// One verb as Go describes it, in C memory.
typedef struct {
	uint8_t op, fence, inlined;
	uint8_t flush; // of Q_FLUSH: Q_VISIBLE, Q_PERSISTENT or both
	uint32_t len;
	uint64_t local, remote;
	uint32_t lkey, rkey;
	uint64_t expect, value;
} q_verb;
_Static_assert(sizeof(q_verb) == 48, "q_verb has padding");

// The client's end of a connection. Used by one thread at a time.
typedef struct {
	struct ibv_qp *qp;
	struct ibv_qp_ex *flushes; // the same, if it has native FLUSH
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	int socket; // wakes a wait when the node says or hangs up
	struct rdma_event_channel *events; // as does this
	int epoll; // over these three, by Q_ON_...
	struct rdma_cm_id *id;
	uint32_t inline_max, depth;

	uint64_t done;   // highest sequence completed
	uint64_t heard;  // messages of the node
	uint64_t awaits; // as many messages belong to what is waited for
	uint64_t failed; // sequence << 16 | index of the first work request that failed; 0 = none
	uint32_t status; // its enum ibv_wc_status
	uint32_t vendor;

	q_verb verbs[Q_CHAIN];
	struct ibv_send_wr wr[Q_CHAIN];
	struct ibv_sge sge[Q_CHAIN];
} q_lane;

enum { Q_ON_CHANNEL, Q_ON_SOCKET, Q_ON_EVENTS };
// A client's receive of a message, among the numbers of its work requests.
#define Q_MESSAGE (1ULL << 63)
enum { Q_PENDING, Q_DONE, Q_FAILED, Q_TIMEOUT, Q_SOCKET, Q_GONE, Q_REMOVED, Q_SYSTEM };

// What exists, to be compared with what should.
typedef struct {
	int64_t contexts, pds, mrs, cqs, channels, qps, ids, event_channels, windows;
} q_objects;
void q_count(q_objects *out);
extern q_objects q_live;
#define Q_BORN(x) __atomic_add_fetch(&q_live.x, 1, __ATOMIC_RELAXED)
#define Q_DIED(x) __atomic_sub_fetch(&q_live.x, 1, __ATOMIC_RELAXED)

// An address of the connection manager.
typedef struct {
	uint8_t gid[16];
	uint32_t scope; // interface of a link-local address
	uint16_t port;
	uint16_t pkey; // of AF_IB, 0 = the default partition
	uint8_t infiniband;
	uint8_t iwarp; // the driver moves queue pairs to the state in which they send
} q_addr;

// How a queue pair uses the network. 0 = as the connection manager says, where that knows.
typedef struct {
	uint8_t traffic_class, service_level;
	uint8_t timeout, retries; // 4.096 us << timeout
} q_link;

// Never blocks on asynchronous events.
struct ibv_context *q_open(struct ibv_device *d);
int q_close(struct ibv_context *ctx);
// Whether a port has a partition key, full or limited member: 1, 0.
int q_has_pkey(struct ibv_context *ctx, uint8_t port, uint16_t pkey, int entries);
int q_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out);
// Takes an asynchronous event, without waiting: its enum ibv_event_type, or -errno.
int q_async(struct ibv_context *ctx);
struct ibv_pd *q_pd(struct ibv_context *ctx);
int q_free_pd(struct ibv_pd *pd);
// Addresses of the region count from base.
struct ibv_mr *q_register(struct ibv_pd *pd, void *addr, uint64_t bytes, uint64_t base, int access);
int q_deregister(struct ibv_mr *mr);

// Lane: completion channel, completion queue and queue pair, in state RESET. Its completions
// interrupt at one of the device's vectors, counted round and round.
typedef struct {
	uint32_t depth, inline_max, vector; // work requests; bytes
	int flush;
} q_lane_want;
int q_lane_open(struct ibv_context *ctx, struct ibv_pd *pd, const q_lane_want *want, q_lane **out);
int q_lane_close(q_lane *l);
int q_post(q_lane *l, int n, uint64_t sequence, int *posted);
int q_wait(q_lane *l, uint64_t sequence, int64_t spin_ns, int64_t limit_ns);
// Posts a WRITE of no bytes with immediate data, which completes a receive of the node; over iWARP, which has none, a SEND of no bytes.
int q_ring(q_lane *l, uint64_t sequence, int iwarp);
// Arms the queue and looks: Q_PENDING if nothing has come, and what comes wakes the epoll.
int q_poll(q_lane *l, uint64_t sequence);
// Native FLUSH, see flush.c.
struct ibv_qp *q_flushing(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t send, uint32_t recv, uint32_t *inline_max, struct ibv_qp_ex **ex);
int q_post_flushing(q_lane *l, int n, uint64_t sequence);
// q_post and q_wait; a negative answer is the error of the former.
int q_once(q_lane *l, int n, uint64_t sequence, int *posted, int64_t spin_ns, int64_t limit_ns);

// Node's end: one completion queue for the flush of all queue pairs' receives.
int q_drains_open(struct ibv_context *ctx, int entries, uint32_t vector, struct ibv_comp_channel **ch, struct ibv_cq **cq);
int q_drains_close(struct ibv_comp_channel *ch, struct ibv_cq *cq);
typedef struct {
	uint64_t id;
	uint32_t status; // enum ibv_wc_status
	uint32_t bytes;  // of a message that was received
	uint32_t rings;  // a WRITE with immediate data has completed the receive
} q_completion;
// Waits for completions or a readable wake; returns how many, or -errno.
int q_drains_wait(struct ibv_comp_channel *ch, struct ibv_cq *cq, int wake, q_completion *out, int max);
struct ibv_qp *q_responder(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t receives);
// Windows of type 2. Their verbs are signaled, one at a time on a queue pair.
struct ibv_mw *q_window(struct ibv_pd *pd);
int q_free_window(struct ibv_mw *w);
int q_bind(struct ibv_qp *qp, struct ibv_mw *w, struct ibv_mr *mr, uint32_t rkey, uint64_t off, uint64_t bytes, int access, uint64_t id);
int q_invalidate(struct ibv_qp *qp, uint32_t rkey, uint64_t id);
// Posts a receive, into memory if bytes is not 0.
int q_receive(struct ibv_qp *qp, uint64_t id, void *to, uint32_t bytes, uint32_t lkey);
// Sends a message, signaled.
int q_send(struct ibv_qp *qp, uint64_t id, const void *from, uint32_t bytes, uint32_t lkey);
int q_destroy_qp(struct ibv_qp *qp);

int q_init(struct ibv_qp *qp, uint8_t port, int access);
int q_error(struct ibv_qp *qp);
int q_state(struct ibv_qp *qp);
// What a queue pair is set to, as the device says.
typedef struct {
	uint8_t state, reads_out, reads_in; // READs and atomics under way: as requester, as responder
	uint8_t timeout, retries, rnr_retries, service_level, traffic_class;
	uint16_t pkey_index;
	uint32_t mtu_bytes, access;
} q_settings;
int q_query(struct ibv_qp *qp, q_settings *out);

// The connection manager. Nanoseconds of the monotonic clock.
int64_t q_now(void);
// What went wrong: the step, and for an answer of the manager its event and status.
enum { Q_STEP_OPEN = 1, Q_STEP_ADDRESS, Q_STEP_DEVICE, Q_STEP_ROUTE, Q_STEP_CONNECT, Q_STEP_QUEUE_PAIR };
typedef struct {
	int step, event, status, error;
} q_failure;
// Connects a lane whose queue pair is in state RESET; Q_DONE, or why not.
int q_lane_connect(q_lane *l, const q_addr *from, const q_addr *to, uint8_t port, const uint8_t *data, uint8_t len,
		   uint8_t reads, const q_link *link, int64_t limit_ns, q_failure *why);
// 0 if this process may use the manager.
int q_manager(void);
// Listens; to->port becomes the port.
int q_listen(struct ibv_context *ctx, uint8_t port, q_addr *at, struct rdma_event_channel **events, struct rdma_cm_id **id);
// Binds an id to a device, to be told when that is removed; q_listen_close drops it.
int q_watch(struct ibv_context *ctx, uint8_t port, const q_addr *at, struct rdma_event_channel **events, struct rdma_cm_id **id);
// Takes what events there are, without waiting: 1 if one of them is the device's removal.
int q_removed(struct rdma_event_channel *events);
int q_listen_close(struct rdma_event_channel *events, struct rdma_cm_id *id);

enum { Q_EVENT_OTHER, Q_EVENT_REQUEST, Q_EVENT_GONE, Q_EVENT_REMOVED };
typedef struct {
	int kind;
	uint64_t lane;         // whom it is about, 0 = the listener
	struct rdma_cm_id *id; // of a request: accept or drop it
	uint8_t reads, len;    // what the client wants to have under way
	uint8_t data[Q_PRIVATE];
} q_event;
// Waits for an event or a readable wake: 1, 0, or -errno.
int q_event_next(struct rdma_event_channel *events, int wake, q_event *out);
int q_accept(struct rdma_cm_id *id, struct ibv_qp *qp, int access, uint8_t reads, const q_link *link, uint64_t lane, int iwarp);
int q_drop(struct rdma_cm_id *id);
int q_reject(struct rdma_cm_id *id);

#endif
