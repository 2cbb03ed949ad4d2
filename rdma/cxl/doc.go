// Package cxl is the fabric between hosts that map one memory: the shm fabric over a device DAX that several hosts have, such as
// memory behind a CXL switch that keeps the hosts' caches coherent.
//
//	host-a                                     the device                      host-b
//	  storage node: Home ---- commands ----->    board    -----------------> Agent  (quarry share)
//	        |             <-- acknowledgements            <-----------------   |
//	  its clients (shm) == verbs ==========>    regions   <========== verbs == its clients (shm)
//
// The storage node owns the device: its directory, its regions, their epochs. On each other host an Agent has what a node's shm server has:
// a host.Access that admits lanes, gate pages, and the fence by the kernel's view of processes. An agent decides nothing: it opens and closes
// regions, and ends sessions, as the Home says, and acknowledges when that is done on its host. Home and agents talk by words of the device
// itself (board.go), so a host that has lost its way to the memory acknowledges nothing, and no port has to be guarded: a process that could
// forge a command can write every region.
//
// # The litmus
//
// Before a host is let in, its agent and the Home test whether the two see one coherent memory (litmus.go). One that is not is refused.
//
// # The fence
//
// A fence, a closed region and a new incarnation of the node are complete when every host that was let in has acknowledged them. What if one does not?
//
//   - Its agent has died, or hangs. The command waits. Another agent of that host takes the slot as soon as it has the device's lock there. Each
//     process that was sent the device holds that lock with it, so the newcomer's run shows that nothing of the former one is left.
//   - The host has restarted. The same: the kernel under which its processes ran has ended. That it is the same machine is shown by its machine id
//     (machine-id(5)); an agent with the name and another id is refused until the operator says that the former host is off.
//   - The host is gone, or its way to the memory is broken. From here it cannot be known whether it still writes. The command waits, and
//     the caller gets an error at its deadline: of regions with several replicas the controllers leave this one (a node that cannot fence is left), and the others
//     serve under a new epoch; a region with one replica stays unavailable. It goes on when the host answers, or when the operator has seen that the
//     host is off, or has had the switch take the memory from it, and says so (--host-gone).
//   - The storage node has died. Its clients on every host go on until their leases end; controllers act as for any node. The next incarnation
//     serves nothing before each host has acknowledged that the last one's clients are gone.
//   - The node's host is gone. Another host may take the device over when the operator says that the first is off: two homes would
//     give two sets of commands.
//
// Time alone never completes a command.
//
// # Trust
//
// A descriptor of a device gives a process all of it. So only processes of the agent's own user, or of root, are sent it: they could open the device by
// themselves. Others use tcp. A process holds the device as long as one of its sessions lives; at the end of the last one the agent sees to it
// that the process has unmapped the device, or kills it, as over shm.
package cxl
