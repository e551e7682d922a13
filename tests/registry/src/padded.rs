//! Makes an image large: layers of files as images of applications have them, half text that compresses to a quarter or
//! so, half bytes that do not compress, of sizes from 4 KiB to 16 MiB. The same every time.

use crate::image::{Image, Layer, Layout};

/// Layers the padding is split into.
const LAYERS: usize = 4;
/// The file [`with_large_file`] adds.
pub const LARGE: &str = "large";
const SMALLEST: u64 = 4 << 10;
/// Sizes are spread evenly over this many doublings.
const DOUBLINGS: f64 = 12.0;

/// Writes `tag` of `from` into `to` with layers on top that make its tars `bytes` in all.
pub fn write(from: &Layout, tag: &str, to: &Layout, name: &str, bytes: u64) {
    let image: Image = from.image(tag);
    let mut layers: Vec<_> = image.layers.iter().map(|layer| to.take(from, layer)).collect();
    let own: u64 = image
        .layers
        .iter()
        .map(|layer| from.tar(layer).len() as u64)
        .sum();
    let each = bytes.saturating_sub(own) / LAYERS as u64;
    for number in 0..LAYERS {
        layers.push(to.gzip_layer(&tar(number as u64, each)));
    }
    to.write(name, &image, &layers);
}

/// Writes `tag` of `from` into `to` with one large file on top, [`LARGE`], half of which compresses.
pub fn with_large_file(from: &Layout, tag: &str, to: &Layout, name: &str, bytes: u64) {
    let image = from.image(tag);
    let mut layers: Vec<_> = image.layers.iter().map(|layer| to.take(from, layer)).collect();
    let mut random = Random(0x1234_5678_9abc_def1);
    let words = vocabulary(&mut random);
    let mut content = prose(&mut random, &words, bytes as usize / 2);
    content.extend(noise(&mut random, bytes as usize / 2));
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_mtime(1_700_000_000);
    header.set_size(content.len() as u64);
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_data(&mut header, LARGE, &content[..]).unwrap();
    layers.push(to.gzip_layer(&builder.into_inner().unwrap()));
    to.write(name, &image, &layers);
}

/// Writes `tag` of `from` into `to` with one byte of one file changed: the file in the middle of the largest layer.
pub fn with_one_change(from: &Layout, tag: &str, to: &Layout, name: &str) {
    let image = from.image(tag);
    let size = |layer: &&Layer| layer.descriptor["size"].as_u64().unwrap();
    let largest = image.layers.iter().max_by_key(size).unwrap();
    let mut tar = from.tar(largest);
    let middle = tar.len() as u64 / 2;
    let mut archive = tar::Archive::new(&tar[..]);
    let position = archive
        .entries()
        .unwrap()
        .map(Result::unwrap)
        .find(|entry| {
            entry.raw_file_position() > middle && entry.header().entry_type().is_file() && entry.size() > 0
        })
        .map(|entry| entry.raw_file_position())
        .unwrap();
    tar[position as usize] ^= 1;
    let layers = image.layers.iter().map(|layer| match layer == largest {
        true => to.gzip_layer(&tar),
        false => to.take(from, layer),
    });
    to.write(name, &image, &layers.collect::<Vec<_>>());
}

/// A tar of about `bytes`, and no more.
fn tar(seed: u64, bytes: u64) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let words = vocabulary(&mut random);
    let mut builder = tar::Builder::new(Vec::with_capacity(bytes as usize));
    // The archive's end, and the last file's header.
    let mut left = bytes.saturating_sub(1024 + 512);
    let (mut texts, mut noises) = (0, 0);
    for number in 0.. {
        if left < SMALLEST {
            break;
        }
        let size = (SMALLEST as f64 * 2f64.powf(random.unit() * DOUBLINGS)) as u64;
        let size = size.min(left);
        let text = texts <= noises;
        *if text { &mut texts } else { &mut noises } += size;
        let content = if text {
            prose(&mut random, &words, size as usize)
        } else {
            noise(&mut random, size as usize)
        };
        let kind = if text { "txt" } else { "bin" };
        let path = format!("opt/padding/{seed}/{:02}/{number:05}.{kind}", number % 50);
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_mtime(1_700_000_000);
        header.set_size(size);
        builder.append_data(&mut header, path, &content[..]).unwrap();
        left = left.saturating_sub(size.next_multiple_of(512) + 512);
    }
    builder.into_inner().unwrap()
}

/// Some thousand words.
fn vocabulary(random: &mut Random) -> Vec<String> {
    let word = |random: &mut Random| {
        let length = 2 + random.next() % 9;
        (0..length)
            .map(|_| char::from(b'a' + (random.next() % 26) as u8))
            .collect()
    };
    (0..6000).map(|_| word(random)).collect()
}

/// Words, the first of the vocabulary more often, in lines.
fn prose(random: &mut Random, words: &[String], size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(size + 16);
    let mut column = 0;
    while out.len() < size {
        let rare = random.unit();
        let word = &words[(rare * rare * rare * words.len() as f64) as usize];
        out.extend_from_slice(word.as_bytes());
        column += word.len() + 1;
        out.push(if column > 80 { b'\n' } else { b' ' });
        column = if column > 80 { 0 } else { column };
    }
    out.truncate(size);
    out
}

fn noise(random: &mut Random, size: usize) -> Vec<u8> {
    let mut out: Vec<u8> = (0..size.div_ceil(8))
        .flat_map(|_| random.next().to_le_bytes())
        .collect();
    out.truncate(size);
    out
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From 0 to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_reproducible_sized_and_half_compressible() {
        let (once, again) = (tar(1, 8 << 20), tar(1, 8 << 20));
        assert!(once == again && once != tar(2, 8 << 20));
        assert!(
            once.len() <= 8 << 20 && once.len() > (8 << 20) - (64 << 10),
            "{}",
            once.len()
        );
        let stored = crate::image::gzip(&once).len() as f64 / once.len() as f64;
        assert!((0.3..0.95).contains(&stored), "{stored}");
    }
}
