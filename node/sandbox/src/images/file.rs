//! Reads a file of an image on the host. The metadata locates its bytes, and missing bytes are fetched.

use std::fs::File;
use std::os::unix::fs::FileExt;

use thaw_imagefs::erofs::{FileType, Inode, Reader};
use thaw_images::store::Image;

use super::Images;
use crate::error::{Error, ErrorKind};

impl Images {
    /// The bytes of a regular file of at most `most` bytes; `None` if there is no such file. Symbolic links are not followed.
    pub async fn read_file(&self, image: &Image, path: &str, most: u64) -> Result<Option<Vec<u8>>, Error> {
        let (metadata, path) = (image.metadata.clone(), path.to_owned());
        let found = crate::blocking::blocking(move || {
            let bytes = std::fs::read(&metadata);
            let bytes =
                bytes.map_err(|e| Error::system(format!("cannot read {}", metadata.display()), &e))?;
            let reader = Reader::new(bytes).map_err(malformed)?;
            let inode = lookup(&reader, &path)?;
            Ok(inode.map(|inode| (reader, inode)))
        });
        let Some((reader, inode)) = found.await?.filter(|(_, inode)| inode.size <= most) else {
            return Ok(None);
        };
        let mut data = vec![0; usize::try_from(inode.size).unwrap_or(0)];
        for mapping in reader.mappings(&inode, 0, inode.size) {
            let mapping = mapping.map_err(malformed)?;
            let Some(address) = mapping.address else { continue };
            let range = mapping.offset as usize..(mapping.offset + mapping.length) as usize;
            let into = data
                .get_mut(range)
                .ok_or_else(|| malformed("a file's extents do not fit it"))?;
            self.read_address(image, reader.bytes(), address, into).await?;
        }
        Ok(Some(data))
    }

    /// Reads from the image's address space: its metadata, followed by its blobs.
    pub(super) async fn read_address(
        &self,
        image: &Image,
        metadata: &[u8],
        mut address: u64,
        mut into: &mut [u8],
    ) -> Result<(), Error> {
        while !into.is_empty() {
            let length = into.len() as u64;
            let inline = usize::try_from(address)
                .ok()
                .and_then(|at| metadata.get(at..))
                .filter(|m| !m.is_empty());
            let taken = if let Some(inline) = inline {
                let taken = inline.len().min(into.len());
                into[..taken].copy_from_slice(&inline[..taken]);
                taken
            } else {
                let blob = image
                    .blobs
                    .iter()
                    .find(|b| (b.address..b.address + b.length).contains(&address));
                let blob = blob.ok_or_else(|| malformed("file data is outside every blob"))?;
                let offset = address - blob.address;
                let taken = length.min(blob.length - offset);
                self.fill(&blob.id, offset, taken).await.map_err(super::failure)?;
                let path = &blob.data;
                File::open(path)
                    .and_then(|file| file.read_exact_at(&mut into[..taken as usize], offset))
                    .map_err(|e| Error::system(format!("cannot read {}", path.display()), &e))?;
                taken as usize
            };
            address += taken as u64;
            into = &mut into[taken..];
        }
        Ok(())
    }
}

fn lookup(reader: &Reader<Vec<u8>>, path: &str) -> Result<Option<Inode>, Error> {
    let mut inode = reader.inode(reader.superblock().root).map_err(malformed)?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        if inode.file_type != FileType::Directory {
            return Ok(None);
        }
        let Some(entry) = reader.lookup(&inode, name.as_bytes()).map_err(malformed)? else {
            return Ok(None);
        };
        inode = reader.inode(entry.nid).map_err(malformed)?;
    }
    Ok((inode.file_type == FileType::File).then_some(inode))
}

pub(super) fn malformed(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::ImageMalformed, format!("the image's metadata: {why}"))
}
