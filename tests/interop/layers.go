package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// words compress well, noise does not.
func words(n int, seed int64) []byte {
	r := rand.New(rand.NewSource(seed))
	var b bytes.Buffer
	for b.Len() < n {
		fmt.Fprintf(&b, "%s %d ", []string{"span", "layer", "chunk", "window", "deflate"}[r.Intn(5)], r.Intn(1000))
	}
	return b.Bytes()[:n]
}

func noise(n int, seed int64) []byte {
	b := make([]byte, n)
	rand.New(rand.NewSource(seed)).Read(b)
	return b
}

// tricky is a tar of every kind of entry; with `whole` seconds and text names only, as an eStargz table can carry.
func tricky(whole bool) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	at := time.Unix(1700000000, 0)
	if !whole {
		at = time.Unix(1700000000, 123456789)
	}
	add := func(h tar.Header, content []byte) {
		h.Size = int64(len(content))
		if h.ModTime.IsZero() {
			h.ModTime = at
		}
		h.Format = tar.FormatPAX
		check(w.WriteHeader(&h))
		_, err := w.Write(content)
		check(err)
	}
	dir := func(name string, mode int64) { add(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}, nil) }
	reg := func(name string, content []byte) {
		add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Uid: 1000, Gid: 100, Uname: "user", Gname: "group"}, content)
	}
	dir("./", 0o755)
	dir("bin/", 0o1777)
	reg("bin/words", words(7<<20, 1))
	reg("bin/noise", noise(3<<20, 2))
	reg("bin/zeros", make([]byte, 5<<20))
	reg("bin/mixed", append(append(words(1<<20, 3), make([]byte, 300_000)...), noise(1234, 4)...))
	reg("empty", nil)
	for i := 0; i < 300; i++ {
		reg(fmt.Sprintf("small/%d", i), words(i*37, int64(i)))
	}
	add(tar.Header{Typeflag: tar.TypeLink, Name: "bin/link", Linkname: "bin/words"}, nil)
	add(tar.Header{Typeflag: tar.TypeSymlink, Name: "soft", Linkname: "/else/../where"}, nil)
	add(tar.Header{Typeflag: tar.TypeChar, Name: "null", Mode: 0o666, Devmajor: 1, Devminor: 3}, nil)
	add(tar.Header{Typeflag: tar.TypeBlock, Name: "loop", Mode: 0o660, Devmajor: 7, Devminor: 300}, nil)
	add(tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600}, nil)
	reg("gone/.wh.file", nil)
	reg("opaque/.wh..wh..opq", nil)
	reg(strings.Repeat("long/", 40)+strings.Repeat("n", 255), words(99, 5))
	add(tar.Header{Typeflag: tar.TypeReg, Name: "attributes", Mode: 0o4755, Uid: 4_000_000_000 % (1 << 31),
		PAXRecords: map[string]string{
			"SCHILY.xattr.user.text":           "value",
			"SCHILY.xattr.user.empty-not":      "\n=",
			"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\xff\x80",
			"SCHILY.xattr.trusted.overlay.x":   "y",
			"VENDOR.other":                     "kept by nobody",
		}}, words(5000, 6))
	add(tar.Header{Typeflag: tar.TypeReg, Name: "epoch", Mode: 0o600, ModTime: time.Unix(0, 0)}, nil)
	before := time.Unix(-86400*365, 0)
	if !whole {
		before = time.Unix(-2, 750_000_000)
	}
	add(tar.Header{Typeflag: tar.TypeReg, Name: "before", Mode: 0o600, ModTime: before}, words(10, 7))
	check(w.Close())
	if whole {
		return b.Bytes()
	}
	// The padding that GNU tar writes: more than a span of it.
	return append(b.Bytes(), make([]byte, 3<<20)...)
}

// gnu packs a directory with the system's tar.
func gnu(format string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "interop")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	long := strings.Repeat("n", 180)
	os.MkdirAll(filepath.Join(dir, long, long), 0o755)
	for name, content := range map[string][]byte{
		"words": words(3<<20, 8), long + "/" + long + "/deep": words(100_000, 9), "not\xfftext": words(77, 10),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o640); err != nil {
			return nil, err
		}
	}
	os.Link(filepath.Join(dir, "words"), filepath.Join(dir, "words-again"))
	os.Symlink(strings.Repeat("t", 300), filepath.Join(dir, "soft"))
	return exec.Command("tar", "-C", dir, "--format="+format, "--sort=name", "--owner=user:70000", "-cf", "-", ".").Output()
}

func compressed(plain []byte, level int) []byte {
	var b bytes.Buffer
	w, _ := gzip.NewWriterLevel(&b, level)
	w.Write(plain)
	w.Close()
	return b.Bytes()
}

// named compresses with the system's gzip and a header longer than ten bytes.
func named(plain []byte) ([]byte, error) {
	dir, err := os.MkdirTemp("", "interop")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "layer.tar")
	if err := os.WriteFile(path, plain, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command("gzip", "-9", "-N", path).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("gzip: %s", out)
	}
	return os.ReadFile(path + ".gz")
}

func gunzip(stored []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(stored))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

func sectionOf(b []byte) *io.SectionReader {
	return io.NewSectionReader(bytes.NewReader(b), 0, int64(len(b)))
}
