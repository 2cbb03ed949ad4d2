/* What shim.c and bridge_unsafe.go share. Types and numbers are those of librpmem 1.3. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define RPMEM_MAJOR_VERSION 1
#define RPMEM_MINOR_VERSION 3
#define RPMEM_REMOVE_FORCE 0x1
#define RPMEM_REMOVE_POOL_SET 0x2
#define RPMEM_MIN_POOL ((size_t)8192)
#define RPMEM_HEADER 4096 /* bytes that no persist reaches: librpmem keeps the attributes there */

typedef struct rpmem_pool RPMEMpool;

struct rpmem_pool_attr {
	char signature[8];
	uint32_t major;
	uint32_t compat_features;
	uint32_t incompat_features;
	uint32_t ro_compat_features;
	unsigned char poolset_uuid[16];
	unsigned char uuid[16];
	unsigned char next_uuid[16];
	unsigned char prev_uuid[16];
	unsigned char user_flags[16];
};
_Static_assert(sizeof(struct rpmem_pool_attr) == 104, "as in librpmem");
