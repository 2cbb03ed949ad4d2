// Package pager serves the page faults of programs that map spaces (package vmm). It runs in a process of its own, for the reason that package vmm gives.
//
//	connection   of a program, one for each mapping; its end is the end of the mapping
//	memory       of a space: a memfd that all programs map, and the pager too. Byte i is the byte at base + i of the space
//	frame        a page that is in the memory. The frames of all spaces together are the budget
//
// # Pages
//
// A page is in no frame, or in one frame, which is clean or dirty. A frame is busy while one goroutine fills, maps, writes back or removes its page; the others
// wait. A goroutine that waits for a busy frame holds none, or only frames of lower pages of the same space; one that fills, or frees frames for itself, does
// not wait for busy ones. So no two wait for each other.
//
// Invariant: a page that is not dirty is write-protected, or not mapped, in every mapping whose stores are the space's. All faults come here, because
// mappings are registered for missing, minor and write-protect faults: the kernel maps no page by itself.
//
// Invariant: a page is mapped only when its bytes are those of the space, or newer ones of programs of this host.
//
// A write-back first protects the page in every mapping, so that its bytes stand still, then WRITEs it, then marks it clean. If the answer is lost the page
// stays dirty and is written again: the same bytes, unless a program has stored into it since.
//
// # CLOCK
//
// Linux does not tell another process which mapped pages a program loads from. So the reference bit of a frame is set by faults alone: the first access by each
// program, and the first store behind a write-back. A page that has been mapped for long is removed although it may be in use; its next access costs a fault.
//
// # The end of the pager
//
// A guard process holds the memory and the userfaultfds, too. When the pager ends, however it ends, the guard takes all pages out of the memory, and poisons
// those that programs wait for or touch later: they get SIGBUS. It ends when no program has a mapping any more. Without a guard they would wait for ever, or, once
// the last descriptor were closed, take missing pages for zeros.
package pager
