/*
 * quarry.h - a client of Quarry, a store of shared memory over RDMA, shared memory and TCP.
 *
 * Link with -lquarry. docs/C.md has the build, the rules for threads, signals and fork, and examples.
 *
 * Answers. Every call that can fail returns one of three values:
 *
 *   QUARRY_DONE      the operation was done
 *   QUARRY_NOT_DONE  it was not done, and never will be
 *   QUARRY_UNKNOWN   it was done once or not at all: read to find out
 *
 * and, where `err` is not NULL, fills *err with the reason and a sentence for people.
 *
 * Handles (quarry_client, quarry_tree, quarry_space, quarry_mapping) are numbers. A number that is not an open handle, or is a handle of
 * another kind, is refused with QUARRY_CLOSED. Any number of threads may use one handle.
 *
 * Pointers belong to the caller, and the library keeps none after a call. A NULL pointer where bytes are
 * expected is refused with QUARRY_ARGUMENT, unless the length is 0. Other invalid pointers cannot be
 * detected: they end the process, as in memcpy.
 *
 * Functions that a call is given (quarry_edit and others) run on the calling thread while the call
 * lasts, unless their comment says otherwise. They must not use the handle, and must not longjmp or throw.
 */
#ifndef QUARRY_H
#define QUARRY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. A library of the same major version has all that this header declares
 * if its minor version is at least as high: see quarry_abi. */
#define QUARRY_ABI_MAJOR 1
#define QUARRY_ABI_MINOR 1

/* The largest payload of an object, in bytes. */
#define QUARRY_MAX_OBJECT_BYTES (64u << 20)
/* The largest number of items of one call with many items. */
#define QUARRY_MAX_ITEMS 65536u

enum quarry_answer {
	QUARRY_DONE = 0,
	QUARRY_NOT_DONE = 1,
	QUARRY_UNKNOWN = 2,
};

/* Why a call was not done, or is unknown. Numbers never change their meaning. */
enum quarry_reason {
	QUARRY_NONE = 0,
	QUARRY_OTHER = 1,         /* see the text */
	QUARRY_ARGUMENT = 2,      /* an argument is outside its documented range */
	QUARRY_CLOSED = 3,        /* the handle is closed, or was never one */
	QUARRY_BUFFER = 4,        /* the buffer is too small; the length that is needed was stored */
	QUARRY_STOPPED = 5,       /* the caller's function said so */
	QUARRY_BAD_REF = 10,      /* the reference names no object of this cluster */
	QUARRY_FREED = 11,        /* the object has been freed */
	QUARRY_CONFLICT = 12,     /* the object, name or key is at another version, or has another value */
	QUARRY_IMMUTABLE = 13,    /* the object is write-once */
	QUARRY_TOO_LARGE = 14,    /* the payload exceeds the object's capacity or the limit */
	QUARRY_NO_SPACE = 15,     /* no region has room, and none can be made */
	QUARRY_BUSY = 16,         /* other writers came first at every attempt: try again later */
	QUARRY_CORRUPT = 17,      /* no replica has a valid image: quarry fsck */
	QUARRY_TENANT = 18,       /* the object belongs to another tenant */
	QUARRY_KEY = 19,          /* encrypted with a key that was not given, or not encrypted, or not authentic */
	QUARRY_READ_ONLY = 20,    /* the client is read-only */
	QUARRY_NOT_FOUND = 21,    /* no such name, key or tree */
	QUARRY_EXISTS = 22,       /* the name or key exists */
	QUARRY_UNREACHABLE = 23,  /* no controller, or no node that holds the object, answered in time */
	QUARRY_FENCED = 24,       /* the session has ended; the next call opens another one */
	QUARRY_LEASE = 25,        /* the session's lease ran out before the answer: try again */
	QUARRY_LOST_ANSWER = 26,  /* the answer was lost: QUARRY_UNKNOWN */
};

/* An error: a reason and a sentence, which is cut to fit and ends with NUL. */
typedef struct quarry_error {
	int32_t reason;
	char text[252];
} quarry_error;

typedef uint64_t quarry_client;
typedef uint64_t quarry_tree;
typedef uint64_t quarry_space;
typedef uint64_t quarry_mapping;

/* A reference names one object for ever. All zero: none. */
typedef struct quarry_ref {
	uint64_t address;
	uint64_t incarnation;
} quarry_ref;

/* ------------------------------------------------------------------------- clients */

enum quarry_durability {
	QUARRY_VOLATILE = 1,   /* acknowledged changes survive as long as a replica's memory does */
	QUARRY_DURABLE = 2,    /* they survive a loss of power, on persistent memory or files */
};

/* Options of quarry_connect. Set bytes to sizeof(quarry_options) and the rest to 0, then what differs: NULL
 * and 0 take the value of the environment variable that the command quarry reads, or else the default. */
typedef struct quarry_options {
	size_t bytes;
	const char *controllers; /* URLs, comma-separated; QUARRY_CONTROLLER; http://127.0.0.1:7420 */
	const char *name;        /* of the session in listings; program@host:pid */
	const char *transport;   /* "auto", "verbs", "shm" or "tcp"; QUARRY_FABRIC */
	const char *token;       /* QUARRY_TOKEN */
	const char *tenant;      /* QUARRY_TENANT */
	uint32_t timeout_ms;     /* bounds each call; 10 000 */
	uint32_t lanes;          /* calls that can run at the same time, 1 to 256; four for each processor */
	uint32_t replicas;       /* of objects whose options name none, 1 to 3; the cluster's default */
	uint32_t durability;     /* of objects whose options name none; QUARRY_VOLATILE */
	uint32_t read_only;      /* 1: the session cannot change memory */
	uint32_t reserved;       /* 0 */
} quarry_options;

/* quarry_abi stores the version of the interface that the library has. */
void quarry_abi(uint32_t *major, uint32_t *minor);
/* quarry_version is the library's version, for people. The text lives as long as the process. */
const char *quarry_version(void);

/* quarry_connect opens a client. NULL for all defaults. Certificates and keys of payloads come from the
 * environment: QUARRY_TLS_CERT, QUARRY_TLS_KEY, QUARRY_TLS_CA, QUARRY_KEY_FILE. */
int quarry_connect(const quarry_options *options, quarry_client *client, quarry_error *err);
/* quarry_close ends the session. Calls that run return, trees and spaces of the client are closed. Mappings stay. */
int quarry_close(quarry_client client, quarry_error *err);

/* ------------------------------------------------------------------------- objects */

typedef struct quarry_alloc_options {
	size_t bytes;        /* sizeof(quarry_alloc_options) */
	uint64_t capacity;   /* of the largest later payload; 0: the room that the first one's slab has */
	uint32_t tag;        /* a number of the caller's own, below 2^18 */
	uint32_t replicas;   /* 1 to 3; 0: of the client */
	uint32_t durability; /* 0: of the client */
	uint32_t write_once; /* 1: takes half the memory and cannot be changed */
} quarry_alloc_options;

typedef struct quarry_info {
	uint64_t version; /* from 1; rises with every change */
	uint64_t bytes;   /* length of the payload */
	uint32_t tag;
	uint32_t write_once; /* quarry_stat alone fills it */
} quarry_info;

/* quarry_alloc makes an object with a first payload. NULL options: a mutable one as large as that. */
int quarry_alloc(quarry_client client, const void *payload, size_t bytes, const quarry_alloc_options *options, quarry_ref *ref, quarry_error *err);
/* quarry_read copies the payload into buffer[0:room] and stores its length, also where the buffer is too small:
 * then QUARRY_NOT_DONE with QUARRY_BUFFER, and nothing is copied. info may be NULL. */
int quarry_read(quarry_client client, quarry_ref ref, void *buffer, size_t room, size_t *bytes, quarry_info *info, quarry_error *err);
/* quarry_read_at copies at most `room` bytes of the payload, from offset on, and stores how many there were. */
int quarry_read_at(quarry_client client, quarry_ref ref, uint64_t offset, void *buffer, size_t room, size_t *bytes, quarry_error *err);
int quarry_stat(quarry_client client, quarry_ref ref, quarry_info *info, quarry_error *err);
/* quarry_write replaces the payload. */
int quarry_write(quarry_client client, quarry_ref ref, const void *payload, size_t bytes, quarry_error *err);
/* quarry_write_if replaces the payload if the object is at a version; else QUARRY_CONFLICT. */
int quarry_write_if(quarry_client client, quarry_ref ref, uint64_t version, const void *payload, size_t bytes, quarry_error *err);
/* quarry_edit is given the payload old[0:bytes] and writes the next one to next[0:room]; it returns its length, or
 * a negative number to leave the object alone. */
typedef int64_t (*quarry_edit)(void *user, const void *old, size_t bytes, void *next, size_t room);
/* quarry_update replaces the payload by what edit makes of it, with no other change between. Other writers
 * wait meanwhile; edit may run more than once. QUARRY_STOPPED if edit leaves the object alone. */
int quarry_update(quarry_client client, quarry_ref ref, size_t room, quarry_edit edit, void *user, quarry_error *err);
int quarry_free(quarry_client client, quarry_ref ref, quarry_error *err);
/* quarry_free_if frees the object if it is at a version; else QUARRY_CONFLICT. */
int quarry_free_if(quarry_client client, quarry_ref ref, uint64_t version, quarry_error *err);

/* Many objects. They share rounds; each has an answer of its own. The call returns QUARRY_DONE if all are done,
 * else the worst answer of them, with the reason and text of the first of those in *err. */

/* quarry_take is given the answer for item i: the payload, or an error with its answer. What it is given is
 * valid until it returns. */
typedef void (*quarry_take)(void *user, size_t i, int answer, const void *payload, size_t bytes, const quarry_error *err);
int quarry_read_many(quarry_client client, const quarry_ref *refs, size_t count, quarry_take take, void *user, quarry_error *err);
/* answers, if not NULL, has room for count answers. */
int quarry_write_many(quarry_client client, const quarry_ref *refs, const void *const *payloads, const size_t *bytes, size_t count, int *answers, quarry_error *err);
int quarry_free_many(quarry_client client, const quarry_ref *refs, size_t count, int *answers, quarry_error *err);

/* ------------------------------------------------------------------------- names */

/* quarry_name_create makes a name of 1 to 255 bytes stand for ref. kind is "object", "tree" or the caller's own.
 * revision may be NULL. */
int quarry_name_create(quarry_client client, const char *name, const char *kind, quarry_ref ref, uint64_t *revision, quarry_error *err);
/* quarry_name_lookup stores what a name stands for; ref and revision may be NULL. */
int quarry_name_lookup(quarry_client client, const char *name, quarry_ref *ref, uint64_t *revision, quarry_error *err);
/* quarry_name_swap makes a name stand for another ref if its entry is at a revision; revision receives the new one. */
int quarry_name_swap(quarry_client client, const char *name, quarry_ref ref, uint64_t *revision, quarry_error *err);
/* quarry_name_delete removes a name if its entry is at a revision; 0: any. The object stays. */
int quarry_name_delete(quarry_client client, const char *name, uint64_t revision, quarry_error *err);
/* quarry_name_each returns 0 to go on. */
typedef int (*quarry_name_each)(void *user, const char *name, const char *kind, quarry_ref ref, uint64_t revision);
/* quarry_name_list calls each for the names with a prefix ("" for all) and a kind ("" for all), in order. It is no
 * snapshot. QUARRY_STOPPED if each ends it. */
int quarry_name_list(quarry_client client, const char *prefix, const char *kind, quarry_name_each each, void *user, quarry_error *err);

/* ------------------------------------------------------------------------- trees */

enum quarry_tree_flags {
	QUARRY_TREE_CREATE = 1,  /* make the tree if the name is free */
	QUARRY_TREE_NEW = 2,     /* make the tree; QUARRY_EXISTS if the name is taken */
};

/* quarry_tree_open opens a tree of keys and values by its name. */
int quarry_tree_open(quarry_client client, const char *name, uint32_t flags, quarry_tree *tree, quarry_error *err);
/* quarry_tree_close forgets the handle; the tree stays. */
int quarry_tree_close(quarry_tree tree, quarry_error *err);
/* quarry_tree_drop deletes the tree's name, frees its memory and closes the handle. */
int quarry_tree_drop(quarry_tree tree, quarry_error *err);

/* quarry_get is quarry_read of a key's value. version may be NULL. */
int quarry_get(quarry_tree tree, const void *key, size_t key_bytes, void *buffer, size_t room, size_t *bytes, uint64_t *version, quarry_error *err);
int quarry_put(quarry_tree tree, const void *key, size_t key_bytes, const void *value, size_t bytes, quarry_error *err);
/* quarry_put_new: QUARRY_EXISTS if the key has a value. version, of the value put, may be NULL here and below. */
int quarry_put_new(quarry_tree tree, const void *key, size_t key_bytes, const void *value, size_t bytes, uint64_t *version, quarry_error *err);
/* quarry_put_if puts a value if the present one has the version *version, which receives the new one; else QUARRY_CONFLICT. */
int quarry_put_if(quarry_tree tree, const void *key, size_t key_bytes, const void *value, size_t bytes, uint64_t *version, quarry_error *err);
int quarry_delete(quarry_tree tree, const void *key, size_t key_bytes, quarry_error *err);
/* quarry_delete_if deletes a key if its value has a version; else QUARRY_CONFLICT. */
int quarry_delete_if(quarry_tree tree, const void *key, size_t key_bytes, uint64_t version, quarry_error *err);
/* quarry_get_many gives the values of keys to take, in any order. */
int quarry_get_many(quarry_tree tree, const void *const *keys, const size_t *key_bytes, size_t count, quarry_take take, void *user, quarry_error *err);
/* quarry_put_many sets keys, each by itself. Of equal keys the last one stays. */
int quarry_put_many(quarry_tree tree, const void *const *keys, const size_t *key_bytes, const void *const *values, const size_t *bytes, size_t count, int *answers, quarry_error *err);
/* quarry_entry returns 0 to go on. It may use other handles, and the tree. */
typedef int (*quarry_entry)(void *user, const void *key, size_t key_bytes, const void *value, size_t bytes, uint64_t version);
/* quarry_scan gives the entries with from <= key < to to each, in order, each key once; to NULL: to the end; limit 0: all;
 * reverse 1: from the last to the first. QUARRY_STOPPED if each ends it. */
int quarry_scan(quarry_tree tree, const void *from, size_t from_bytes, const void *to, size_t to_bytes, uint64_t limit, int reverse, quarry_entry each, void *user, quarry_error *err);

/* ------------------------------------------------------------------------- spaces */

/* A space is a range of virtual addresses, the same at every client. Its first address is a multiple of 2 GiB; bytes are zero before
 * they are written. Only words are atomic. The functions were added with interface 1.1. */
typedef struct quarry_space_info {
	uint64_t base;         /* first address */
	uint64_t bytes;
	uint64_t region_bytes; /* of each region of it */
	uint32_t replicas;
	uint32_t durable;      /* 1: writes survive a loss of power */
} quarry_space_info;

/* quarry_space_create makes a space of at least so many bytes. replicas 1 to 3; 0: of the client. */
int quarry_space_create(quarry_client client, const char *name, uint64_t bytes, uint32_t replicas, quarry_space *space, quarry_error *err);
int quarry_space_open(quarry_client client, const char *name, quarry_space *space, quarry_error *err);
/* quarry_space_close forgets the handle; the space stays. */
int quarry_space_close(quarry_space space, quarry_error *err);
/* quarry_space_delete removes a space with what it holds. */
int quarry_space_delete(quarry_client client, const char *name, quarry_error *err);
int quarry_space_grow(quarry_space space, uint64_t bytes, quarry_error *err);
int quarry_space_stat(quarry_space space, quarry_space_info *info, quarry_error *err);
int quarry_space_read(quarry_space space, uint64_t address, void *buffer, size_t bytes, quarry_error *err);
/* quarry_space_write writes to every replica. QUARRY_UNKNOWN: any of the bytes may have been written. */
int quarry_space_write(quarry_space space, uint64_t address, const void *data, size_t bytes, quarry_error *err);
/* Words of 8 bytes at multiples of 8, in little-endian order. They linearize over all clients and across failovers. */
int quarry_space_load64(quarry_space space, uint64_t address, uint64_t *value, quarry_error *err);
int quarry_space_store64(quarry_space space, uint64_t address, uint64_t value, quarry_error *err);
/* quarry_space_cas64 sets a word to value if it is expect; else QUARRY_CONFLICT. old, which may be NULL, receives what it was. */
int quarry_space_cas64(quarry_space space, uint64_t address, uint64_t expect, uint64_t value, uint64_t *old, quarry_error *err);
/* quarry_space_add64 adds to a word, modulo 2^64. old may be NULL. */
int quarry_space_add64(quarry_space space, uint64_t address, uint64_t addend, uint64_t *old, quarry_error *err);

/* ------------------------------------------------------------------------- spaces in memory */

enum quarry_map_mode {
	QUARRY_MAP_RELEASE = 1, /* stores are the space's: seen by this host at once, by others behind a release and their acquire */
	QUARRY_MAP_PRIVATE = 2, /* stores are this mapping's own */
};

/* quarry_map maps whole pages of 4096 bytes of a space at their own address, which *memory receives. The pages come from `quarry pager`, which
 * is started if there is none: QUARRY_UNREACHABLE if it cannot be; QUARRY_EXISTS if something is mapped there. An access to a page that cannot be
 * had ends with SIGBUS. */
int quarry_map(quarry_space space, uint64_t address, uint64_t bytes, uint32_t mode, void **memory, quarry_mapping *mapping, quarry_error *err);
/* quarry_map_sync and quarry_map_release write back what programs of this host have stored into a range. */
int quarry_map_sync(quarry_mapping mapping, uint64_t address, uint64_t bytes, quarry_error *err);
int quarry_map_release(quarry_mapping mapping, uint64_t address, uint64_t bytes, quarry_error *err);
/* quarry_map_acquire drops pages of a range that differ from the space, but for those with stores that were not released. */
int quarry_map_acquire(quarry_mapping mapping, uint64_t address, uint64_t bytes, quarry_error *err);
/* quarry_map_prefetch reads pages of a range before they are touched. */
int quarry_map_prefetch(quarry_mapping mapping, uint64_t address, uint64_t bytes, quarry_error *err);
/* quarry_unmap writes back and unmaps. The memory must not be touched any more, whatever it returns. */
int quarry_unmap(quarry_mapping mapping, quarry_error *err);

#ifdef __cplusplus
}
#endif

#endif
