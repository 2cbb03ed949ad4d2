package sim

// choices makes every choice of a run, from a generator or from a list that is replayed.
type choices struct {
	state  uint64   // of the generator
	replay []uint16 // played if not nil; 0 beyond its end
	at     int      // next of replay
	taken  []uint16 // the choices made, if record is set
	record bool     // whether choices are kept in taken
}

func (c *choices) reset(seed uint64) {
	c.state = seed*0x9e3779b97f4a7c15 + 0x1234567
	c.at, c.replay = 0, nil
	c.taken = c.taken[:0]
}

func (c *choices) next() uint64 {
	// splitmix64, for which every seed is good.
	c.state += 0x9e3779b97f4a7c15
	x := c.state
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// choose draws a number in [0,n). Preconditions: 0 < n <= 1<<16.
func (c *choices) choose(n int) int {
	if n <= 1 {
		return 0
	}
	var k int
	switch {
	case c.replay == nil:
		k = int(c.next() >> 32 * uint64(n) >> 32)
	case c.at < len(c.replay):
		k = int(c.replay[c.at]) % n
		c.at++
	}
	if c.record {
		c.taken = append(c.taken, uint16(k))
	}
	return k
}
