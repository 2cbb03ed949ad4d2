package space

// HoldLayout keeps looks from replacing the layout until release is called.
func (s *Space) HoldLayout() (release func()) {
	s.mu.Lock()
	return s.mu.Unlock
}
