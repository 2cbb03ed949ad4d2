package clock

import "testing"

// BenchmarkNow and BenchmarkLook are what a lease check costs without and with the wall clock.
func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		Now()
	}
}

func BenchmarkLook(b *testing.B) {
	for b.Loop() {
		Look()
	}
}
