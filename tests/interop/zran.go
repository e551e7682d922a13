package main

// Checkpoints within gzip by zlib itself, as SOCI's tool makes and uses them: what the Rust side is compared with.

/*
#cgo LDFLAGS: -lz
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { WINDOW = 32768 };

typedef struct {
	int64_t in, out;
	uint8_t bits;
	uint8_t window[WINDOW];
} point;

// Finds checkpoints at least `span` bytes of output apart. Returns their number, or a negative error of zlib.
static int64_t find(uint8_t *data, int64_t length, int64_t span, point **points, int64_t *total) {
	z_stream stream;
	uint8_t window[WINDOW];
	int64_t in = 0, out = 0, last = 0, count = 0, room = 0;
	memset(&stream, 0, sizeof stream);
	memset(window, 0, sizeof window);
	if (inflateInit2(&stream, 47) != Z_OK)
		return -100;
	*points = NULL;
	int code = Z_OK;
	while (code != Z_STREAM_END) {
		if (stream.avail_out == 0) {
			stream.next_out = window;
			stream.avail_out = WINDOW;
		}
		int64_t left = length - in;
		if (left == 0)
			break;
		stream.next_in = data + in;
		stream.avail_in = left > 1 << 20 ? 1 << 20 : (uInt)left;
		uInt had_in = stream.avail_in, had_out = stream.avail_out;
		code = inflate(&stream, Z_BLOCK);
		in += had_in - stream.avail_in;
		out += had_out - stream.avail_out;
		if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) {
			inflateEnd(&stream);
			return code;
		}
		int at_block = (stream.data_type & 128) && !(stream.data_type & 64);
		if (code != Z_STREAM_END && at_block && (out == 0 || out - last > span)) {
			if (count == room) {
				room = room ? 2 * room : 16;
				*points = realloc(*points, room * sizeof(point));
			}
			point *here = *points + count++;
			here->in = in;
			here->out = out;
			here->bits = stream.data_type & 7;
			// The window is a ring whose oldest byte is where the next one goes.
			size_t newest = WINDOW - stream.avail_out;
			memcpy(here->window, window + newest, WINDOW - newest);
			memcpy(here->window + WINDOW - newest, window, newest);
			last = out;
		}
	}
	inflateEnd(&stream);
	*total = out;
	return code == Z_STREAM_END ? count : -101;
}

// Inflates from a checkpoint until `out` is full. `data` starts with the byte that has the bits, if there are any.
static int resume(uint8_t *data, int64_t length, int bits, uint8_t *window, uint8_t *out, int64_t want) {
	z_stream stream;
	memset(&stream, 0, sizeof stream);
	if (inflateInit2(&stream, -15) != Z_OK)
		return -100;
	if (bits) {
		inflatePrime(&stream, bits, data[0] >> (8 - bits));
		data++;
		length--;
	}
	inflateSetDictionary(&stream, window, WINDOW);
	stream.next_in = data;
	stream.avail_in = (uInt)length;
	stream.next_out = out;
	stream.avail_out = (uInt)want;
	int code = Z_OK;
	while (stream.avail_out > 0 && code == Z_OK)
		code = inflate(&stream, Z_NO_FLUSH);
	inflateEnd(&stream);
	return stream.avail_out == 0 ? 0 : -101;
}
*/
import "C"

import (
	"fmt"
	"unsafe"
)

const windowSize = 32768

type point struct {
	in, out int64
	bits    byte
	window  [windowSize]byte
}

func findPoints(stored []byte, span int64) ([]point, int64, error) {
	var found *C.point
	var total C.int64_t
	count := C.find((*C.uint8_t)(&stored[0]), C.int64_t(len(stored)), C.int64_t(span), &found, &total)
	if count < 0 {
		return nil, 0, fmt.Errorf("zlib: %d", count)
	}
	defer C.free(unsafe.Pointer(found))
	points := make([]point, count)
	for i, here := range unsafe.Slice(found, int(count)) {
		points[i].in, points[i].out, points[i].bits = int64(here.in), int64(here.out), byte(here.bits)
		copy(points[i].window[:], C.GoBytes(unsafe.Pointer(&here.window[0]), windowSize))
	}
	return points, int64(total), nil
}

func resume(stored []byte, at *point, want int64) ([]byte, error) {
	if want == 0 {
		return nil, nil
	}
	out := make([]byte, want)
	code := C.resume((*C.uint8_t)(&stored[0]), C.int64_t(len(stored)), C.int(at.bits),
		(*C.uint8_t)(&at.window[0]), (*C.uint8_t)(&out[0]), C.int64_t(want))
	if code != 0 {
		return nil, fmt.Errorf("zlib: %d", code)
	}
	return out, nil
}
