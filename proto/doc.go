// Package proto fixes every word that another machine can see: the layout of a
// region, its block headers, free-slab maps and slabs, the addresses that name
// them, and (in proto/quarrypb) the messages of the control plane.
//
// # A region
//
//	+0          region header      4 KiB     written by the agent only      RegionHeader
//	+4 KiB      block headers      8 B each  changed by CAS only            Header
//	...         free-slab maps     2 KiB each, one bit a slab, 1 = taken    changed by CAS only
//	DataOffset  blocks             1 MiB each, aligned to 1 MiB
//
// Every block has one class (the size of its slabs) and one kind. Its slabs lie one behind the
// other from its beginning; see Class. A scan computes offsets from slab numbers: most sizes do
// not divide a block, and the bytes behind the last slab belong to none.
//
// # A slab
//
//	R  the reservation: 0, or the session that may change the slab and the number of its attempt
//	V  state (FREE, LIVE, BAD) and version: which image is the object's value
//	L  of STAGED slabs: the locator, which says where the redo record of the latest change is
//
// R and V are changed by CAS only; L and the images by WRITE only: one access class per word.
// A reconcile, and the zeroing of a reclaimed block, store them by WRITE: then no verb of a client
// is under way there.
//
//	PAIR    0              S/2-8   S/2    S/2+8           S
//	(>=128) | image A      | R     | V    | image B       |   version even: A, odd: B
//
//	SINGLE  0     8     16                                S
//	(>=64)  | R   | V   | image                           |
//
//	STAGED  0   8   16  24                                S
//	        | R | V | L | home ............... | record   |
//
//	image   0      8                 16             24                       32
//	        | checksum | length, version | tag, born    | writer session, seq    | payload ...
//
// A PAIR slab has two places for images, so that the next version is written beside the present
// one. A SINGLE slab is written once. A STAGED slab has one image, home. Its change is written
// as a redo record first, then V is changed, and then home is overwritten: docs/LAYOUT2.md.
//
// The record stands in the same slab behind home (RecordInline: ranges of bytes that differ), or
// is a whole image in another slab (RecordShadow). L has its kind, its offset and its length.
// RecordGone says that no record is left; in place of an offset L then has a version that a
// dead session may have given to a record, and that no other change may get. Functions: Locator, EncodeRecord,
// AppendPatch, Slab.Compose.
//
// # Words, most significant bit on the left
//
//	V       | spare:18 | state:2 | version:44 |
//	R       | session:18 | sequence:46 |
//	Header  | state:3 | kind:2 | class:7 | generation:20 | session:18 | spare:14 |
//	Addr    | region:32 | offset:32 |
//	Ref     Addr, then | generation:20 | born:44 |
//	length, version  | length:20 | version:44 |
//	L       | spare:10 | kind:2 | offset:32 | bytes:20 |      RecordInline, RecordShadow
//	L       | spare:10 | 3:2 | spare:8 | version:44 |         RecordGone
//	tag, born        | tag:20 | born:44 |
//
// All words are little endian in memory, as the CPUs that CAS them are.
// Spare bits are zero and checked. An all-zero region body is a formatted,
// empty region: every block FREE, every slab FREE at version 0.
//
// # Obligations
//
// A word READ from remote memory is untrusted: call Valid once, where it enters the program, and
// use only that checked copy from then on. The layout is part of the format: a change is a new
// LayoutVersion.
//
// The reservation word takes the place of the reservation bit of US
// 2017/0149890 [0051]: a bit does not say which session holds it, so that session could not
// be fenced. Regions of 2 GiB follow its [0047], slabs that one READ or one WRITE
// covers its [0068].
package proto
