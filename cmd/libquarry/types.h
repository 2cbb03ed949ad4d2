/* For cgo, which has no const: pointers to these are the const pointers of quarry.h, so that the C compiler
 * compares each exported function with its declaration. */
#pragma once
#include "quarry.h"

typedef const char quarry_text;
typedef const void *quarry_bytes; /* with pointers to it for arrays */
typedef const size_t quarry_length;
typedef const quarry_ref quarry_refs;
typedef const quarry_options quarry_connect_options;
typedef const quarry_alloc_options quarry_new_options;
typedef const void *const quarry_item;

static inline int64_t call_edit(quarry_edit f, void *user, const void *old, size_t bytes, void *next, size_t room) {
	return f(user, old, bytes, next, room);
}
static inline void call_take(quarry_take f, void *user, size_t i, int answer, const void *payload, size_t bytes, const quarry_error *err) {
	f(user, i, answer, payload, bytes, err);
}
static inline int call_name(quarry_name_each f, void *user, const char *name, const char *kind, quarry_ref ref, uint64_t revision) {
	return f(user, name, kind, ref, revision);
}
static inline int call_entry(quarry_entry f, void *user, const void *key, size_t key_bytes, const void *value, size_t bytes, uint64_t version) {
	return f(user, key, key_bytes, value, bytes, version);
}
