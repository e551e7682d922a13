package main

// Ztocs as SOCI's schema (version 0.9) and its tool's documents have them, read and written with the FlatBuffers library
// and the tar reader of the language that tool is written in.

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"sort"
	"time"

	flatbuffers "github.com/google/flatbuffers/go"
)

type file struct {
	Name, Type            string
	Offset, Size          int64
	Link                  string
	Mode                  int64
	UID, GID              uint32
	User, Group, Modified string
	Major, Minor          int64
	Records               map[string]string
}

type ztoc struct {
	Version, Tool string
	Stored, Total int64
	Files         []file
	Algorithm     byte
	MaxSpan       int32
	Digests       []string
	Checkpoints   []byte
}

const (
	gzipped      = 1
	uncompressed = 2
)

// counted tells how far the tar reader has read.
type counted struct {
	from io.Reader
	at   int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.at += int64(n)
	return n, err
}

var types = map[byte]string{
	tar.TypeReg: "reg", tar.TypeDir: "dir", tar.TypeLink: "hardlink", tar.TypeSymlink: "symlink",
	tar.TypeChar: "char", tar.TypeBlock: "block", tar.TypeFifo: "fifo",
}

// scan lists a tar's entries, their content, and where the archive ends.
func scan(plain []byte) ([]file, [][]byte, int64, error) {
	at := &counted{from: bytes.NewReader(plain)}
	reader := tar.NewReader(at)
	var files []file
	var contents [][]byte
	for {
		header, err := reader.Next()
		if err == io.EOF {
			return files, contents, at.at, nil
		}
		if err != nil {
			return nil, nil, 0, err
		}
		modified, err := header.ModTime.UTC().MarshalText()
		if err != nil {
			return nil, nil, 0, err
		}
		entry := file{
			Name: header.Name, Type: types[header.Typeflag], Offset: at.at, Size: header.Size, Link: header.Linkname,
			Mode: header.Mode, UID: uint32(header.Uid), GID: uint32(header.Gid), User: header.Uname, Group: header.Gname,
			Modified: string(modified), Major: header.Devmajor, Minor: header.Devminor, Records: header.PAXRecords,
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			return nil, nil, 0, err
		}
		files = append(files, entry)
		contents = append(contents, content)
	}
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// span is a range of stored bytes and what to expand it with.
type span struct {
	from, to   int64
	start, end int64
	at         *point
}

func gzipSpans(points []point, stored, total int64) []span {
	spans := make([]span, len(points))
	for i := range points {
		here := &points[i]
		spans[i] = span{from: here.in, to: stored, start: here.out, end: total, at: here}
		if here.bits != 0 {
			spans[i].from--
		}
		if i+1 < len(points) {
			spans[i].to, spans[i].end = points[i+1].in, points[i+1].out
		}
	}
	return spans
}

// build makes the ztoc of a layer; firstVersion leaves the first checkpoint out.
func build(stored, plain []byte, size int64, isGzip, firstVersion bool) (*ztoc, error) {
	files, _, end, err := scan(plain)
	if err != nil {
		return nil, err
	}
	z := &ztoc{Version: "0.9", Tool: "interop", Stored: int64(len(stored)), Total: end, Files: files}
	var out bytes.Buffer
	put := func(v any) { binary.Write(&out, binary.LittleEndian, v) }
	if !isGzip {
		z.Algorithm = uncompressed
		b := flatbuffers.NewBuilder(0)
		b.StartObject(3)
		b.PrependInt32Slot(0, 2, 0)
		b.PrependInt64Slot(1, size, 0)
		b.PrependInt64Slot(2, int64(len(stored)), 0)
		b.Finish(b.EndObject())
		out.Write(b.FinishedBytes())
		for from := int64(0); from < int64(len(stored)); from += size {
			z.Digests = append(z.Digests, digest(stored[from:min(from+size, int64(len(stored)))]))
		}
	} else {
		z.Algorithm = gzipped
		points, _, err := findPoints(stored, size)
		if err != nil {
			return nil, err
		}
		put(int32(len(points)))
		put(size)
		for i, here := range points {
			if i == 0 && firstVersion {
				continue
			}
			put(here.in)
			put(here.out)
			put(here.bits)
			out.Write(here.window[:])
		}
		for _, s := range gzipSpans(points, int64(len(stored)), end) {
			z.Digests = append(z.Digests, digest(stored[s.from:s.to]))
		}
	}
	z.MaxSpan = int32(len(z.Digests)) - 1
	z.Checkpoints = out.Bytes()
	return z, nil
}

func vector(b *flatbuffers.Builder, items []flatbuffers.UOffsetT) flatbuffers.UOffsetT {
	b.StartVector(4, len(items), 4)
	for i := len(items) - 1; i >= 0; i-- {
		b.PrependUOffsetT(items[i])
	}
	return b.EndVector(len(items))
}

func (f *file) marshal(b *flatbuffers.Builder) flatbuffers.UOffsetT {
	text := map[int]flatbuffers.UOffsetT{}
	for slot, value := range map[int]string{
		0: f.Name, 1: f.Type, 4: f.Link, 8: f.User, 9: f.Group, 10: f.Modified,
	} {
		text[slot] = b.CreateString(value)
	}
	var keys []string
	for key := range f.Records {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	var records []flatbuffers.UOffsetT
	for _, key := range keys {
		k, v := b.CreateString(key), b.CreateString(f.Records[key])
		b.StartObject(2)
		b.PrependUOffsetTSlot(0, k, 0)
		b.PrependUOffsetTSlot(1, v, 0)
		records = append(records, b.EndObject())
	}
	xattrs := vector(b, records)
	b.StartObject(14)
	for slot, offset := range text {
		b.PrependUOffsetTSlot(slot, offset, 0)
	}
	b.PrependInt64Slot(2, f.Offset, 0)
	b.PrependInt64Slot(3, f.Size, 0)
	b.PrependInt64Slot(5, f.Mode, 0)
	b.PrependUint32Slot(6, f.UID, 0)
	b.PrependUint32Slot(7, f.GID, 0)
	b.PrependInt64Slot(11, f.Major, 0)
	b.PrependInt64Slot(12, f.Minor, 0)
	b.PrependUOffsetTSlot(13, xattrs, 0)
	return b.EndObject()
}

func (z *ztoc) marshal() []byte {
	b := flatbuffers.NewBuilder(0)
	version, tool := b.CreateString(z.Version), b.CreateString(z.Tool)
	var items []flatbuffers.UOffsetT
	for i := range z.Files {
		items = append(items, z.Files[i].marshal(b))
	}
	list := vector(b, items)
	b.StartObject(1)
	b.PrependUOffsetTSlot(0, list, 0)
	toc := b.EndObject()
	checkpoints := b.CreateByteVector(z.Checkpoints)
	items = nil
	for _, d := range z.Digests {
		items = append(items, b.CreateString(d))
	}
	digests := vector(b, items)
	b.StartObject(4)
	b.PrependByteSlot(0, z.Algorithm, gzipped)
	b.PrependInt32Slot(1, z.MaxSpan, 0)
	b.PrependUOffsetTSlot(2, digests, 0)
	b.PrependUOffsetTSlot(3, checkpoints, 0)
	info := b.EndObject()
	b.StartObject(6)
	b.PrependUOffsetTSlot(0, version, 0)
	b.PrependUOffsetTSlot(1, tool, 0)
	b.PrependInt64Slot(2, z.Stored, 0)
	b.PrependInt64Slot(3, z.Total, 0)
	b.PrependUOffsetTSlot(4, toc, 0)
	b.PrependUOffsetTSlot(5, info, 0)
	b.Finish(b.EndObject())
	return b.FinishedBytes()
}

// table reads fields by their number in the schema.
type table struct{ flatbuffers.Table }

func (t table) at(slot int) flatbuffers.UOffsetT {
	offset := flatbuffers.UOffsetT(t.Offset(flatbuffers.VOffsetT(4 + 2*slot)))
	if offset == 0 {
		return 0
	}
	return offset + t.Pos
}

func (t table) text(slot int) string {
	if at := t.at(slot); at != 0 {
		return string(t.ByteVector(at))
	}
	return ""
}

func (t table) int64(slot int) int64 {
	if at := t.at(slot); at != 0 {
		return t.GetInt64(at)
	}
	return 0
}

func (t table) uint32(slot int) uint32 {
	if at := t.at(slot); at != 0 {
		return t.GetUint32(at)
	}
	return 0
}

func (t table) child(slot int) table {
	at := t.at(slot)
	return table{flatbuffers.Table{Bytes: t.Bytes, Pos: t.Indirect(at)}}
}

func (t table) items(slot int) (found []flatbuffers.UOffsetT) {
	at := t.at(slot)
	if at == 0 {
		return nil
	}
	offset := flatbuffers.UOffsetT(t.Offset(flatbuffers.VOffsetT(4 + 2*slot)))
	start, length := t.Vector(offset), t.VectorLen(offset)
	for i := 0; i < length; i++ {
		found = append(found, start+flatbuffers.UOffsetT(4*i))
	}
	return found
}

func (t table) tables(slot int) (found []table) {
	for _, at := range t.items(slot) {
		found = append(found, table{flatbuffers.Table{Bytes: t.Bytes, Pos: t.Indirect(at)}})
	}
	return found
}

func unmarshal(b []byte) *ztoc {
	root := table{flatbuffers.Table{Bytes: b, Pos: flatbuffers.GetUOffsetT(b)}}
	info := root.child(5)
	z := &ztoc{
		Version: root.text(0), Tool: root.text(1), Stored: root.int64(2), Total: root.int64(3),
		Algorithm: gzipped, MaxSpan: int32(info.uint32(1)), Checkpoints: []byte(info.text(3)),
	}
	if at := info.at(0); at != 0 {
		z.Algorithm = info.GetByte(at)
	}
	for _, at := range info.items(2) {
		z.Digests = append(z.Digests, string(info.ByteVector(at)))
	}
	for _, t := range root.child(4).tables(0) {
		f := file{
			Name: t.text(0), Type: t.text(1), Offset: t.int64(2), Size: t.int64(3), Link: t.text(4), Mode: t.int64(5),
			UID: t.uint32(6), GID: t.uint32(7), User: t.text(8), Group: t.text(9), Modified: t.text(10),
			Major: t.int64(11), Minor: t.int64(12),
		}
		for _, x := range t.tables(13) {
			if f.Records == nil {
				f.Records = map[string]string{}
			}
			f.Records[x.text(0)] = x.text(1)
		}
		z.Files = append(z.Files, f)
	}
	return z
}

// spans decodes the checkpoints.
func (z *ztoc) spans() ([]span, error) {
	if z.Algorithm == uncompressed {
		info := table{flatbuffers.Table{Bytes: z.Checkpoints, Pos: flatbuffers.GetUOffsetT(z.Checkpoints)}}
		size, total := info.int64(1), info.int64(2)
		if info.uint32(0) != 2 || size <= 0 || total != z.Stored {
			return nil, fmt.Errorf("spans of %d bytes of %d, not %d", size, total, z.Stored)
		}
		var spans []span
		for from := int64(0); from < total; from += size {
			to := min(from+size, total)
			spans = append(spans, span{from: from, to: to, start: from, end: to})
		}
		return spans, nil
	}
	in := bytes.NewReader(z.Checkpoints)
	get := func(v any) error { return binary.Read(in, binary.LittleEndian, v) }
	var head int32
	var size int64
	if err := get(&head); err != nil {
		return nil, err
	}
	if err := get(&size); err != nil {
		return nil, err
	}
	points := make([]point, head)
	for i := range points {
		here := &points[i]
		for _, v := range []any{&here.in, &here.out, &here.bits, &here.window} {
			if err := get(v); err != nil {
				return nil, err
			}
		}
	}
	if in.Len() != 0 {
		return nil, fmt.Errorf("%d bytes after the checkpoints", in.Len())
	}
	return gzipSpans(points, z.Stored, z.Total), nil
}

// expand reads and verifies every span of a layer, each from its own stored bytes alone.
func (z *ztoc) expand(stored []byte) ([]byte, error) {
	if z.Stored != int64(len(stored)) {
		return nil, fmt.Errorf("it is of a layer of %d bytes, not %d", z.Stored, len(stored))
	}
	spans, err := z.spans()
	if err != nil {
		return nil, err
	}
	if len(spans) != len(z.Digests) || int(z.MaxSpan) != len(spans)-1 {
		return nil, fmt.Errorf("%d spans, %d digests, largest span %d", len(spans), len(z.Digests), z.MaxSpan)
	}
	var plain []byte
	for i, s := range spans {
		bytes := stored[s.from:s.to]
		if digest(bytes) != z.Digests[i] {
			return nil, fmt.Errorf("span %d has another digest", i)
		}
		if s.at != nil {
			if bytes, err = resume(bytes, s.at, s.end-s.start); err != nil {
				return nil, fmt.Errorf("span %d: %w", i, err)
			}
		}
		plain = append(plain, bytes...)
	}
	return plain, nil
}

// same compares times as moments, everything else as it stands.
func (f *file) same(o *file) error {
	a, b := *f, *o
	for _, t := range []*string{&a.Modified, &b.Modified} {
		moment, err := time.Parse(time.RFC3339Nano, *t)
		if err != nil {
			return err
		}
		*t = moment.UTC().Format(time.RFC3339Nano)
	}
	if left, right := fmt.Sprintf("%#v", a), fmt.Sprintf("%#v", b); left != right {
		return fmt.Errorf("%s\nis not\n%s", left, right)
	}
	return nil
}
