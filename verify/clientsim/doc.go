// Package clientsim runs whole clusters in one process under seeded faults: the real
// clients, trees and commands, the real controllers and storage nodes, and a network,
// an etcd and a clock that a seed hurts.
package clientsim
