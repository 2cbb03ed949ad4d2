package sim

import "testing"

// BenchmarkSchedule is one schedule of 4 clients and 24 operations, checked.
func BenchmarkSchedule(b *testing.B) {
	for name, o := range map[string]Options{
		"protocol": {Clients: 4, Ops: 24, AnyScheduler: true, Faults: Kill | Pause | Break},
		"failover": {Clients: 4, Ops: 24, AnyScheduler: true, Faults: AllFaults &^ Power},
		"durable":  {Clients: 4, Ops: 24, AnyScheduler: true, Faults: AllFaults, Durable: true},
	} {
		b.Run(name, func(b *testing.B) {
			r := NewRunner()
			defer r.Close()
			o.Seed, o.Schedules, o.Porcupine = 1, b.N, 8
			b.ReportAllocs()
			rep := r.Run(o, nil)
			if rep.Failure != nil {
				b.Fatal(rep.Failure)
			}
			b.ReportMetric(rep.Rate(), "schedules/s")
		})
	}
}
