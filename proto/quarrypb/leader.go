package quarrypb

// LeaderHeader is the header of a standby controller's answers that holds the
// leader's URL, where the standby knows it.
const LeaderHeader = "Quarry-Leader"
