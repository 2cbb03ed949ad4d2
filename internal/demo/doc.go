// Package demo is Quarry's main job on real input: keep every file of a directory
// as an object, with a catalogue that is an object itself, and give every byte back
// to another process over another provider.
//
//	loaded, err := demo.Load(ctx, c, dir, demo.Options{})      // one process
//	read, err := demo.ReadBack(ctx, c2, dir, demo.Options{})   // another one
//	freed, err := demo.FreeThird(ctx, c, demo.Options{})
package demo
