// Package uffd has the calls of userfaultfd(2) that serve page faults on shared memory from another process.
//
//	program                                  pager
//	  Open, Register its mapping
//	  | -- the descriptor, over a socket -----> |
//	  load or store: the thread sleeps          Parse: an Event with the address
//	  |                                         the page gets its bytes in the memfd
//	  | <- the page is mapped, thread wakes --  Continue, WriteProtect or Poison
//
// It needs Linux 6.6: UFFDIO_POISON is of 6.6, write protection by UFFDIO_CONTINUE of 6.4.
package uffd
