package btree

// bugID names a deliberate bug: a line of the protocol left out. With build tag
// simbug the tests switch them on one by one, and each must be found.
type bugID int

const (
	bugParentFirst      bugID = iota + 1 // a split posts the right node before the left is committed
	bugLeftFirst                         // a split commits the left node before the right has its entries
	bugAbsorbUnchecked                   // L absorbs R without its stamp being looked at
	bugNoFreeze                          // R takes writes while L absorbs it
	bugFrozenRead                        // readers take a frozen node's entries without asking
	bugThawUnchecked                     // R is thawed without asking whether it has been absorbed
	bugFencesUnchecked                   // leaves are taken as they come
	bugSplitUnchecked                    // a split commits over what others have changed
	bugScanFollowsLinks                  // a scan goes on at the right link of what it read, whatever is there
	bugLayerUnmarked                     // the entry of an empty layer goes without the layer being marked dead
	bugDeadWritten                       // writers do not look whether their layer is dead
	bugVersionsAgain                     // versions in a new layer do not go on where the last one ended
	bugCount
)
