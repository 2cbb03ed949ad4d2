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
// Slabs of a class lie one behind the other from the beginning of their block; see Class. A walk
// goes by slab number: most sizes do not divide a block, and the bytes behind the last slab
// belong to none.
//
// # A slab
//
// The words R (the session that reserved it) and V (state and version) are changed by CAS
// only, the images by WRITE only: one access class per word.
//
//	PAIR    0              S/2-8   S/2    S/2+8           S
//	(>=128) | image A      | R     | V    | image B       |   version even: A, odd: B
//
//	SINGLE  0     8     16                                S
//	(>=64)  | R   | V   | image                           |
//
//	image   0      8                 16             24                       32
//	        | checksum | length, version | tag, born    | writer session, seq    | payload ...
//
// STAGED slabs have one image, home, and a redo record of the latest change: Locator, the functions
// of records, and Slab.Compose. docs/LAYOUT2.md is their protocol.
//
//	STAGED  0   8   16  24                                S
//	        | R | V | L | home ............... | record   |
//
// # Words, most significant bit on the left
//
//	V       | spare:18 | state:2 | version:44 |
//	R       | session:18 | sequence:46 |
//	Header  | state:3 | kind:2 | class:7 | generation:20 | session:18 | spare:14 |
//	Addr    | region:32 | offset:32 |
//	Ref     Addr, then | generation:20 | born:44 |
//	length, version  | length:20 | version:44 |
//	L       | spare:10 | kind:2 | offset:32 | bytes:20 |
//	tag, born        | tag:20 | born:44 |
//
// All words are little endian in memory, as the CPUs that CAS them are.
// Spare bits are zero and checked. An all-zero region body is a formatted,
// empty region: every block FREE, every slab FREE at version 0.
//
// # Obligations
//
// Words just read from remote memory are untrusted: call Valid once at the
// gateway, then trust the copy. The layout is part of the format: a change is a
// new LayoutVersion.
//
// The reservation word takes the place of the reservation bit of US
// 2017/0149890 [0051]: a bit does not say which session holds it, so that session could not
// be fenced. Regions of 2 GiB follow its [0047], slabs that one READ or one WRITE
// covers its [0068].
package proto
