package slab

// Bug names a deliberate bug. Each is a line of the protocol left out; with build
// tag simbug the simulator switches them on one by one and must find each.
type Bug int

const (
	BugNoSealCheck          Bug = iota // images are taken without looking at the seal
	BugVersionUncompared               // an image need not carry V's version
	BugBornUnchecked                   // another object's image is taken for the ref's
	BugLeaseUnchecked                  // answers are given without a lease
	BugReadAnyReplica                  // reads go to a backup
	BugTakeoverUnfenced                // reservations of the living are taken over
	BugReleaseEarly                    // R is released before V is committed
	BugSkipBackup                      // one backup is not written
	BugPrimaryFirst                    // the primary commits before the backups
	BugFlipBeforeImage                 // a backup's V is flipped ahead of the image
	BugBackupUnflipped                 // backups get the image but not the flip
	BugIgnoreJoiner                    // writers leave out a rebuilding replica
	BugJoinerUnforced                  // a joiner's V is not forced forward
	BugNoRollBack                      // a takeover does not roll the backups back
	BugUnsettledSession                // an unsettled operation does not end its session
	BugStaleMagazine                   // claims of an earlier epoch are used
	BugUnstampedClaim                  // claims are not stamped with a reservation
	BugDroppedClaimReserved            // a dropped claim keeps its reservation
	BugNoHeaderCheck                   // a claim or reservation does not look at the block header
	BugFenceFlagMissing                // the fence flag behind READs and atomics is left out
	BugFlushNothing                    // durable operations do not flush
	BugFormatUnflushed                 // a durable format does not flush its headers
	BugReadBeforeDead                  // an unknown outcome is read back before the old connection is dead
	BugHeldBeforeFree                  // a holder is waited for although the object is gone
	BugNoVersionSkip                   // a leftover image may share its version with the next
	BugDoubleFree                      // Free does not look at born and state
	BugInPlace                         // the active image is overwritten
	BugStaleHeaders                    // cached headers survive the epoch
	BugGenerationKept                  // reclaim does not raise the generation
	BugReclaimNoPass                   // reclaim does not wait before it looks
	BugReclaimOnePhase                 // reclaim zeroes without the second pass
	BugReclaimIgnoresR                 // reclaim does not look at reservations
	BugReclaimNoTurn                   // a reclaim begins while what an earlier one has posted is under way
	BugReservationsKept                // reconcile leaves reservations as they are
	BugHeaderOfPrimary                 // reconcile takes the new primary's headers
	BugJoinerUnreconciled              // reconcile leaves a joiner's words as they are
	BugJoinerNotZeroed                 // a joiner is neither zeroed nor reset
	BugCopierUnreserved                // the copier does not take the reservation
	BugCopierKeepsR                    // the copier keeps the reservation
	BugCopierTrustsScan                // the copier does not look at V again under the reservation
	BugReconcileUnflushed              // reconcile flushes only what it changes
	BugNoReconcile                     // a failover opens without reconciling
	BugKeysKept                        // a failover does not rotate keys
	BugLeasesIgnored                   // a failover does not wait for leases
	BugFencedLeaseIgnored              // a failover does not wait for sessions that are fenced
	BugCertificateEarly                // a certificate is given before all nodes have acknowledged
	BugFencePrimaryOnly                // only the primary is asked to fence
	BugTimeoutIsFence                  // a node that does not answer counts as fenced
	BugSessionReused                   // a session id is given out again before its fence
	BugReusedUnpassed                  // a session id is given out again while a takeover from it may be under way
	BugOldEpochAccepted                // agents accept an epoch that is over
	BugReleaseByWrite                  // R is released by a WRITE of 0
	BugCrossDomain                     // a region is opened through another atomicity domain
	BugShortVersion                    // versions have four bits
	BugAnswerTrusted                   // a lost answer is taken for a success
	BugScrubSkipsDraining              // the scrub passes over blocks that are draining
	BugScrubUnleased                   // the scrub's answer does not ask for a lease
	BugTakerWritesImage                // a takeover writes the image to a joiner
	BugRepairWraps                     // a repair does not look whether versions are left
	BugTableErrorIsEpoch               // who cannot ask for the table takes the epoch for over
	BugClaimsDropped                   // an epoch's end drops the claims of the next one too
	BugClaimLost                       // a claim whose birth was refused is forgotten
	BugZeroUnflushed                   // a reclaimed block is free before its zeros are durable
	BugCount
)

// Broken says whether a deliberate bug is switched on, for the packages above.
func Broken(b Bug) bool { return bug(b) }
