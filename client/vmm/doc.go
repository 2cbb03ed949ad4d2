// Package vmm maps spaces into the memory of programs: a load or store at an address of the space reads or changes the byte that every other client
// has at this address. It is the virtual memory manager of US 12,386,765 (FIG. 1B, 146; FIG. 2A-2C; claims 1 and 6): it finds the memory region
// of an address (step 302, FIG. 3A) and sends the request to the node that has it (step 304).
//
//	m, err := vmm.Map(ctx, s, s.Base(), s.Bytes(), vmm.Release, vmm.Options{})   // s is a *space.Space
//	b := m.Bytes()                       // at address s.Base() in this process, as in any other
//	err = m.Do(func() { b[17] = 1 })
//	err = m.Sync(ctx, m.Base(), 4096)    // the stores are in the space
//
// # The pager
//
// Pages come from the pager of the host, a process of its own (quarry pager), which keeps copies of pages within a budget of memory. It is no part
// of the program, because a Go program that served its own page faults could wait for itself for ever: a goroutine in a page fault cannot be stopped, so when the
// garbage collector stops the world everything waits for the fault, and the goroutine that would serve it waits, too. All programs of a host that map a space share
// its pages: a store of one is seen by the loads of the others as in any shared memory.
//
// A page that is not there faults; the pager reads it from the space, and further ones ahead where accesses go up in sequence. The first store into a page faults, so
// that the pager knows which pages are dirty. Dirty pages are written back by Sync and Release, and when the pager needs their memory, and when a mapping ends.
//
// # What programs see
//
// Between hosts nothing is coherent by itself. With Mode Release, memory is entry consistent: a program takes a lock that it shares with the other hosts
// (a word of the space: space.CAS64), calls Acquire for the range that the lock protects, loads and stores, calls Release, and gives the lock back. The unit is the page
// of 4 KiB: two hosts that store into one page under different locks lose stores. In a Private mapping stores stay the program's own.
//
// Words are never torn; more than that is not atomic, as in package space. While a page is written back no program can store into it.
//
// # Faults that fail
//
// A page that cannot be read (the cluster is unreachable, the space was deleted, the pager has ended) gives SIGBUS, as a file does that cannot be read. In Go this ends
// the program, unless the access is within Do, which returns the reason. In programs built with the race detector that holds for plain loads and stores only, since atomics fault in the detector's C code. Stores that were not written back when the pager or the host ended are lost, as if they had not been made.
//
// Do not give a mapping's memory to system calls (read, write, sendfile) unless the process may serve faults of the kernel: root may; see Mapping.UserFaultsOnly.
// A child process of fork has no mapping.
package vmm
