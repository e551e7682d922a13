//! A metadata image: every slot is taken for an inode, and read as everything an inode can be.

use thaw_imagefs::erofs::Reader;

pub fn run(image: &[u8]) {
    let Ok(reader) = Reader::new(image) else { return };
    let slots = (image.len() / 32) as u64;
    for nid in (0..slots.min(512)).chain([reader.superblock().root, slots, u64::MAX]) {
        let Ok(inode) = reader.inode(nid) else { continue };
        let _ = reader.read_link(&inode);
        let _ = reader.lookup(&inode, b"name");
        let _ = reader.xattr(&inode, b"user.name");
        if let Ok(entries) = reader.entries(&inode, 0) {
            assert!(entries.take(image.len() + 1).count() <= image.len());
        }
        if let Ok(xattrs) = reader.xattrs(&inode) {
            assert!(xattrs.take(image.len() + 1).count() <= image.len());
        }
        let mut at = 0;
        for piece in reader.mappings(&inode, 0, 1 << 20) {
            let Ok(piece) = piece else { break };
            assert_eq!(piece.offset, at);
            at += piece.length;
        }
        assert!(at <= 1 << 20);
    }
}
