// Package pagerlink is the socket between a program that maps a space (package vmm) and the pager of its host: messages of JSON on a
// SOCK_SEQPACKET unix socket, one connection for each mapping.
//
//	program                                            pager
//	  | -- map {version, space, address, bytes, mode} --> |
//	  | <- {read_only, pid} + memfd --------------------- |
//	  maps the memfd, registers it with userfaultfd
//	  | -- attach + userfaultfd ------------------------> |
//	  | <- {} ------------------------------------------- |  from now on the pager serves its faults
//	  | -- sync, acquire, prefetch, why {address, bytes}> |  in any number at once: answers carry the request's id
//	  | <- {error, kind} -------------------------------- |
//	  | -- end of stream -------------------------------> |  the mapping is gone
//	  | <- end of stream -------------------------------- |  the pager is gone
package pagerlink
