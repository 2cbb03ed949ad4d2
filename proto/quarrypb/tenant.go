package quarrypb

// Quota is what a tenant uses of one resource, and the most that it may; Most 0: no bound.
type Quota struct {
	Resource   string // bytes, sessions or lanes
	Used, Most uint64
}

// Quotas are those of all resources, in a fixed order.
func (t *Tenant) Quotas() []Quota {
	u := t.GetUse()
	return []Quota{
		{"bytes", u.GetBytes(), t.GetQuotaBytes()},
		{"sessions", uint64(u.GetSessions()), uint64(t.GetQuotaSessions())},
		{"lanes", uint64(u.GetLanes()), uint64(t.GetQuotaLanes())},
	}
}
