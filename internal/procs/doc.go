// Package procs has an idle process wake fewer threads, and children that end with their parents.
//
// Follow keeps the Go runtime of an idle process on one processor. With more than one, each wake
// wakes a second thread that looks for work and finds none: a quarter of what an idle controller
// costs. A look of one system call every half second shows what the process uses, and gives it all
// processors again as soon as it is not idle.
//
// Slack lets the kernel expire timers a little later, together. The runtime's monitor thread looks
// every 20 us while anything runs, and wakes at each timer beside the thread that waits for it. That
// thread wakes twice, because the runtime rounds the time it waits for down to milliseconds. With a
// slack of 4 ms these are half as many wakes.
//
// OnOtherThread is for a parent whose children are to end with it.
package procs
