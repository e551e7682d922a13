// Interop makes layers and their documents for the Rust side to read, and reads the documents the Rust side wrote.
//
//	interop make DIR    DIR/soci/NAME/{plain.tar,layer,ztoc}, DIR/estargz/NAME/{plain.tar,layer,annotations.json}
//	interop check DIR   DIR/soci/NAME/ours, if it is there, against plain.tar and layer
//	interop same DIR    DIR/thaw against DIR/ztoc: every entry
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/containerd/stargz-snapshotter/estargz/zstdchunked"
	"github.com/klauspost/compress/zstd"
)

func put(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func makeSoci(dir string) error {
	gnuTar, err := gnu("gnu")
	if err != nil {
		return err
	}
	paxTar, err := gnu("pax")
	if err != nil {
		return err
	}
	exact := tricky(false)
	withName, err := named(exact)
	if err != nil {
		return err
	}
	for name, layer := range map[string]struct {
		plain, stored []byte
		span          int64
		isGzip, first bool
	}{
		"fast":          {exact, compressed(exact, 1), 1 << 20, true, false},
		"best":          {exact, compressed(exact, 9), 4 << 20, true, false},
		"small-spans":   {exact, compressed(exact, 6), 1 << 16, true, false},
		"first-version": {exact, compressed(exact, 6), 1 << 20, true, true},
		"stored-blocks": {exact, compressed(exact, 0), 1 << 20, true, false},
		"named":         {exact, withName, 1 << 20, true, false},
		"gnu":           {gnuTar, compressed(gnuTar, 6), 1 << 20, true, false},
		"pax":           {paxTar, compressed(paxTar, 6), 1 << 20, true, false},
		"plain":         {exact, exact, 1 << 20, false, false},
	} {
		z, err := build(layer.stored, layer.plain, layer.span, layer.isGzip, layer.first)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		written := z.marshal()
		if back := unmarshal(written); fmt.Sprintf("%v", back) != fmt.Sprintf("%v", z) {
			return fmt.Errorf("%s: a ztoc does not come back", name)
		}
		files := map[string][]byte{"plain.tar": layer.plain, "layer": layer.stored, "ztoc": written}
		if err := put(filepath.Join(dir, name), files); err != nil {
			return err
		}
	}
	return nil
}

func makeEstargz(dir string) error {
	plain := tricky(true)
	for name, how := range map[string]struct {
		chunk, least int
		isZstd       bool
	}{
		"default":      {0, 0, false},
		"small-chunks": {50_000, 0, false},
		"large-least":  {0, 100_000, false},
		"both":         {300_000, 200_000, false},
		"zstd":         {0, 0, true},
		"zstd-small":   {50_000, 0, true},
	} {
		var stored bytes.Buffer
		annotations := map[string]string{}
		var compressor estargz.Compressor = estargz.NewGzipCompressor()
		if how.isZstd {
			compressor = &zstdchunked.Compressor{CompressionLevel: zstd.SpeedDefault, Metadata: annotations}
		}
		w := estargz.NewWriterWithCompressor(&stored, compressor)
		w.ChunkSize, w.MinChunkSize = how.chunk, how.least
		if err := w.AppendTar(bytes.NewReader(plain)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		toc, err := w.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		annotations[estargz.TOCJSONDigestAnnotation] = toc.String()
		text, err := json.Marshal(annotations)
		if err != nil {
			return err
		}
		files := map[string][]byte{"plain.tar": plain, "layer": stored.Bytes(), "annotations.json": text}
		if err := put(filepath.Join(dir, name), files); err != nil {
			return err
		}
	}
	// As an image build makes it: sorted, in parallel, with a landmark.
	blob, err := estargz.Build(sectionOf(plain), estargz.WithPrioritizedFiles([]string{"bin/mixed", "epoch"}))
	if err != nil {
		return err
	}
	var stored bytes.Buffer
	if _, err := stored.ReadFrom(blob); err != nil {
		return err
	}
	text, err := json.Marshal(map[string]string{estargz.TOCJSONDigestAnnotation: blob.TOCDigest().String()})
	if err != nil {
		return err
	}
	files := map[string][]byte{"plain.tar": plain, "layer": stored.Bytes(), "annotations.json": text}
	return put(filepath.Join(dir, "built"), files)
}

// check reads one ztoc the Rust side wrote.
func check(dir string) (string, error) {
	var parts [3][]byte
	for i, name := range []string{"ours", "layer", "plain.tar"} {
		var err error
		if parts[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return "", err
		}
	}
	ours, stored, plain := parts[0], parts[1], parts[2]
	z := unmarshal(ours)
	files, contents, _, err := scan(plain)
	if err != nil {
		return "", err
	}
	if z.Version != "0.9" || len(z.Files) != len(files) {
		return "", fmt.Errorf("version %q, %d entries instead of %d", z.Version, len(z.Files), len(files))
	}
	expanded, err := z.expand(stored)
	if err != nil {
		return "", err
	}
	next, total := int64(0), 0
	for i := range files {
		entry := &z.Files[i]
		if err := entry.same(&files[i]); err != nil {
			return "", err
		}
		if entry.Offset < next {
			return "", fmt.Errorf("%s: entries overlap", entry.Name)
		}
		next = entry.Offset + entry.Size
		if !bytes.Equal(expanded[entry.Offset:next], contents[i]) {
			return "", fmt.Errorf("%s: its content differs", entry.Name)
		}
		total += len(contents[i])
	}
	return fmt.Sprintf("%d entries, %d spans, %d bytes of files, ztoc of %d bytes", len(files), len(z.Digests), total, len(ours)), nil
}

// same compares the entries of two ztocs of one layer.
func same(dir string) error {
	var both [2]*ztoc
	for i, name := range []string{"thaw", "ztoc"} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		both[i] = unmarshal(content)
	}
	ours, theirs := both[0], both[1]
	if len(ours.Files) != len(theirs.Files) || ours.Version != theirs.Version || ours.Stored != theirs.Stored {
		return fmt.Errorf("%d entries instead of %d", len(ours.Files), len(theirs.Files))
	}
	for i := range ours.Files {
		if err := ours.Files[i].same(&theirs.Files[i]); err != nil {
			return err
		}
	}
	return nil
}

func run() error {
	if len(os.Args) != 3 {
		return fmt.Errorf("usage: interop make|check|same DIR")
	}
	dir := os.Args[2]
	switch os.Args[1] {
	case "make":
		if err := makeSoci(filepath.Join(dir, "soci")); err != nil {
			return err
		}
		return makeEstargz(filepath.Join(dir, "estargz"))
	case "same":
		return same(dir)
	case "check":
		layers, err := filepath.Glob(filepath.Join(dir, "soci", "*"))
		if err != nil || len(layers) == 0 {
			return fmt.Errorf("no layers in %s", dir)
		}
		for _, layer := range layers {
			found, err := check(layer)
			if err != nil {
				return fmt.Errorf("%s: %w", filepath.Base(layer), err)
			}
			fmt.Printf("soci/%s: our ztoc read, every file the same: %s\n", filepath.Base(layer), found)
		}
		return nil
	}
	return fmt.Errorf("unknown: %s", os.Args[1])
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		os.Exit(1)
	}
}
