// Package demo is Quarry's main job on real input: keep every file of a directory in
// a tree, path -> content, and give every byte back: to another process over another
// provider, to redis-cli through a gateway, and to a job that indexes the texts.
//
//	loaded, err := demo.Load(ctx, c, dir, demo.Options{})             // one process
//	read, err := demo.ReadBack(ctx, c2, dir, false, demo.Options{})   // another one
//	gone, err := demo.DeleteThird(ctx, c, dir, demo.Options{})
//	found, err := demo.Index(ctx, c, dir, "garbage collector")
package demo
