//go:build cgo && verbs

#ifndef QUARRY_VERBS_H
#define QUARRY_VERBS_H

#include <infiniband/verbs.h>
#include <stdint.h>

// A chain has at most this many verbs (rdma.MaxChainVerbs).
#define Q_CHAIN 256
// Work requests of one queue pair: four full chains under way.
#define Q_SEND_WRS 1024

enum { Q_READ = 1, Q_WRITE, Q_CAS, Q_FAA };

// One verb as Go describes it, in C memory.
typedef struct {
	uint8_t op, fence, inlined, spare;
	uint32_t len;
	uint64_t local, remote;
	uint32_t lkey, rkey;
	uint64_t expect, value;
} q_verb;
_Static_assert(sizeof(q_verb) == 48, "q_verb has padding");

// The client's end of a connection. Used by one thread at a time.
typedef struct {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	int socket; // wakes a wait when the node says or hangs up
	uint32_t inline_max;

	uint64_t done;   // highest sequence completed
	uint64_t failed; // sequence << 16 | index of the first work request that failed; 0 = none
	uint32_t status; // its enum ibv_wc_status
	uint32_t vendor;

	q_verb verbs[Q_CHAIN];
	struct ibv_send_wr wr[Q_CHAIN];
	struct ibv_sge sge[Q_CHAIN];
} q_lane;

enum { Q_PENDING, Q_DONE, Q_FAILED, Q_TIMEOUT, Q_SOCKET, Q_SYSTEM };

// What exists, to be compared with what should.
typedef struct {
	int64_t contexts, pds, mrs, cqs, channels, qps;
} q_objects;
void q_count(q_objects *out);

struct ibv_context *q_open(struct ibv_device *d);
int q_close(struct ibv_context *ctx);
int q_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out);
struct ibv_pd *q_pd(struct ibv_context *ctx);
int q_free_pd(struct ibv_pd *pd);
// Addresses of the region count from base.
struct ibv_mr *q_register(struct ibv_pd *pd, void *addr, uint64_t bytes, uint64_t base, int access);
int q_deregister(struct ibv_mr *mr);

// Lane: completion channel, completion queue and queue pair, in state RESET.
int q_lane_open(struct ibv_context *ctx, struct ibv_pd *pd, uint32_t inline_want, q_lane **out);
int q_lane_close(q_lane *l);
int q_post(q_lane *l, int n, uint64_t sequence, int *posted);
int q_wait(q_lane *l, uint64_t sequence, int64_t spin_ns, int64_t limit_ns);
// q_post and q_wait; a negative answer is the error of the former.
int q_once(q_lane *l, int n, uint64_t sequence, int *posted, int64_t spin_ns, int64_t limit_ns);

// Node's end: one completion queue for the flush of all queue pairs' receives.
int q_drains_open(struct ibv_context *ctx, int entries, struct ibv_comp_channel **ch, struct ibv_cq **cq);
int q_drains_close(struct ibv_comp_channel *ch, struct ibv_cq *cq);
// Waits for completions or a readable wake; returns how many ids, or -errno.
int q_drains_wait(struct ibv_comp_channel *ch, struct ibv_cq *cq, int wake, uint64_t *ids, int max);
struct ibv_qp *q_responder(struct ibv_pd *pd, struct ibv_cq *cq);
int q_receive(struct ibv_qp *qp, uint64_t id);
int q_destroy_qp(struct ibv_qp *qp);

int q_init(struct ibv_qp *qp, uint8_t port, int access);
int q_rtr(struct ibv_qp *qp, uint8_t port, uint8_t sgid_index, int mtu, const uint8_t *dgid, int global,
	  uint16_t dlid, uint32_t dqpn, uint32_t psn, uint8_t rd_atomic);
int q_rts(struct ibv_qp *qp, uint32_t psn, uint8_t rd_atomic);
int q_error(struct ibv_qp *qp);
int q_state(struct ibv_qp *qp);

#endif
