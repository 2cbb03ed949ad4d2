package sim

// Script is a directed scenario: it gives clients their work and sets faults.
type Script struct {
	Name  string
	Start func(w *world)
}

// strictAlarm: within the promises, nobody ever finds what cannot be.
func (o *Options) strictAlarm() bool { return true }
