package job

import (
	"context"
	"time"
)

// ForgetExpired is what a submission at a moment does first.
func (s *Store) ForgetExpired(ctx context.Context, now time.Time) { s.forgetExpired(ctx, now) }
