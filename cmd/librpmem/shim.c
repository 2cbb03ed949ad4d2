//go:build cgo

/* The functions of librpmem, by their public prototypes. Each thread has its own errno and text of the last error. */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "bridge.h"
#include "_cgo_export.h"

#define API __attribute__((visibility("default")))

static __thread char text[1024];

/* answer turns an errno into the answer of librpmem. */
static int answer(int error) {
	if (error == 0)
		return 0;
	errno = error;
	return -1;
}

static int refuse(int error, const char *why) {
	snprintf(text, sizeof text, "%s", why);
	return answer(error);
}

static RPMEMpool *get(const char *target, const char *name, void *addr, size_t size, unsigned *nlanes, struct rpmem_pool_attr *attr, int create) {
	uint64_t number = 0;
	long page = sysconf(_SC_PAGESIZE);
	const char *wrong = NULL;
	if (target == NULL || name == NULL || nlanes == NULL)
		wrong = "target, pool set name or number of lanes is NULL";
	else if (addr == NULL || (uintptr_t)addr % (uintptr_t)page != 0)
		wrong = "the memory does not begin at a page";
	else if (size < RPMEM_MIN_POOL || size % (size_t)page != 0)
		wrong = "the size of the memory is less than 8 KiB, or not one of whole pages";
	else if (*nlanes == 0)
		wrong = "0 lanes";
	if (wrong != NULL) {
		refuse(EINVAL, wrong);
		return NULL;
	}
	if (answer(quarry_rpmem_get((char *)target, (char *)name, addr, size, nlanes, attr, create, &number, text, sizeof text)) != 0)
		return NULL;
	return (RPMEMpool *)(uintptr_t)number;
}

API RPMEMpool *rpmem_create(const char *target, const char *pool_set_name, void *pool_addr, size_t pool_size, unsigned *nlanes, const struct rpmem_pool_attr *create_attr) {
	return get(target, pool_set_name, pool_addr, pool_size, nlanes, (struct rpmem_pool_attr *)create_attr, 1);
}

API RPMEMpool *rpmem_open(const char *target, const char *pool_set_name, void *pool_addr, size_t pool_size, unsigned *nlanes, struct rpmem_pool_attr *open_attr) {
	return get(target, pool_set_name, pool_addr, pool_size, nlanes, open_attr, 0);
}

API int rpmem_set_attr(RPMEMpool *rpp, const struct rpmem_pool_attr *attr) {
	if (attr == NULL)
		return refuse(EINVAL, "the attributes are NULL");
	return answer(quarry_rpmem_set_attr((uint64_t)(uintptr_t)rpp, (struct rpmem_pool_attr *)attr, text, sizeof text));
}

API int rpmem_close(RPMEMpool *rpp) { return answer(quarry_rpmem_close((uint64_t)(uintptr_t)rpp, text, sizeof text)); }

/* A flag allows less than a persist promises. */
API int rpmem_persist(RPMEMpool *rpp, size_t offset, size_t length, unsigned lane, unsigned flags) {
	(void)flags;
	return answer(quarry_rpmem_persist((uint64_t)(uintptr_t)rpp, offset, length, lane, 0, text, sizeof text));
}

/* A flush is a persist, so that a drain has nothing to wait for. */
API int rpmem_flush(RPMEMpool *rpp, size_t offset, size_t length, unsigned lane, unsigned flags) { return rpmem_persist(rpp, offset, length, lane, flags); }

API int rpmem_drain(RPMEMpool *rpp, unsigned lane, unsigned flags) {
	(void)flags;
	return answer(quarry_rpmem_persist((uint64_t)(uintptr_t)rpp, RPMEM_HEADER, 0, lane, 0, text, sizeof text));
}

API int rpmem_deep_persist(RPMEMpool *rpp, size_t offset, size_t length, unsigned lane) {
	return answer(quarry_rpmem_persist((uint64_t)(uintptr_t)rpp, offset, length, lane, 1, text, sizeof text));
}

API int rpmem_read(RPMEMpool *rpp, void *buff, size_t offset, size_t length, unsigned lane) {
	if (buff == NULL && length > 0)
		return refuse(EINVAL, "the buffer is NULL");
	return answer(quarry_rpmem_read((uint64_t)(uintptr_t)rpp, buff, offset, length, lane, text, sizeof text));
}

API int rpmem_remove(const char *target, const char *pool_set, int flags) {
	if (target == NULL || pool_set == NULL || (flags & ~(RPMEM_REMOVE_FORCE | RPMEM_REMOVE_POOL_SET)) != 0)
		return refuse(EINVAL, "target or pool set name is NULL, or a flag is not known");
	return answer(quarry_rpmem_remove((char *)target, (char *)pool_set, text, sizeof text));
}

API const char *rpmem_check_version(unsigned major_required, unsigned minor_required) {
	if (major_required != RPMEM_MAJOR_VERSION)
		return "librpmem major version mismatch";
	if (minor_required > RPMEM_MINOR_VERSION)
		return "librpmem minor version mismatch";
	return NULL;
}

API const char *rpmem_errormsg(void) { return text; }
