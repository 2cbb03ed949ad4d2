package job

import (
	"context"
	"time"
)

// ForgetExpired is what a submission at a moment does first.
func (s *Store) ForgetExpired(ctx context.Context, now time.Time) { s.forgetExpired(ctx, now) }

// MapParts is the number of parts of a job that does not say how many.
func MapParts(workers int, bytes int64) int { return mapParts(workers, bytes) }
