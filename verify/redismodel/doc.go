// Package redismodel is a model of what docs/REDIS.md promises of commands on strings,
// counters, hashes and sorted sets, and of RENAME and COPY across keys, for porcupine. Tests
// of package resp and chaos runs compare histories with it.
//
//	bad, exception := redismodel.Check(events, time.Minute)
//
// Script makes commands that the model knows.
package redismodel
