// Package userdir is the folder in which processes of one user on this host find each other: the
// shm sockets of storage nodes that have no path of their own, and the token and certificate authority of quarry
// dev.
//
// It is in the folder for temporary files. There itself, every user of the host could make files
// with the names that others look for.
package userdir
