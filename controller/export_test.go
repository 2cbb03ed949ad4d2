package controller

import "time"

// SetJobClock has the queue of jobs go by another clock.
func SetJobClock(c *Controller, now func() time.Time) { c.jobQueue.clock.Store(&now) }

// Limits of the queue of jobs.
const (
	MaxQueued   = maxQueued
	QueueHold   = queueHold
	QueueAnswer = queueAnswer
	QueueLasts  = queueLasts
)
