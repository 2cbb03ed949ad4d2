// Package doctor looks for what makes a host or a cluster fail or slow: limits,
// memory, adapters, clocks, ports, controllers, versions. It changes nothing. Each
// finding says what was seen and, unless it is well, what to do.
//
//	h := doctor.Host{Root: "/"}
//	for _, f := range h.Check(doctor.Plan{CapacityBytes: 64 << 30}) {
//		fmt.Println(f.Level, f.Check, f.What, f.Remedy)
//	}
package doctor
