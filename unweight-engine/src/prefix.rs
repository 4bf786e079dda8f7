//! Beginnings of prompts whose pages several sequences share.
//!
//! ```text
//! (root) -- tokens 0..C --> node, C / 64 pages -- tokens C..2C --> node -- ...
//! ```
//! A node is one whole chunk of a prompt, as prefill cuts prompts, behind the chunks of its ancestors. Prefill of a
//! prompt that begins with these tokens starts behind them. Its later chunks have the same rows as without the cache,
//! so its logits have the same bits. Tokens are compared, not their digests.

use std::{collections::HashMap, sync::Arc};

/// Identifies a node of one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(usize);

/// A chunk and the node in front of it.
type Key = (Option<NodeId>, Arc<[u32]>);

#[derive(Debug)]
struct Node {
    key: Key,
    pages: Vec<u32>,
    /// Sequences that read its pages.
    users: u32,
    children: u32,
    /// When a sequence took it or let go of it.
    used: u64,
}

impl Node {
    /// Its pages, if no sequence reads them.
    fn idle_pages(&self) -> u32 {
        if self.users == 0 { self.pages.len() as u32 } else { 0 }
    }
}

/// Shared pages by the tokens that they hold.
#[derive(Debug)]
pub struct PrefixCache {
    /// Tokens of a node.
    chunk: usize,
    nodes: Vec<Option<Node>>,
    /// Unused places of `nodes`.
    vacant: Vec<usize>,
    index: HashMap<Key, NodeId>,
    clock: u64,
    /// [`PrefixCache::idle_pages`], which every step asks for.
    idle: u32,
}

impl PrefixCache {
    /// An empty cache for prompts that are cut every `chunk` tokens.
    pub fn new(chunk: u32) -> Self {
        let (nodes, vacant, index) = (Vec::new(), Vec::new(), HashMap::new());
        Self { chunk: chunk.max(1) as usize, nodes, vacant, index, clock: 0, idle: 0 }
    }

    /// The nodes of the longest cached beginning of a prompt, from the first token on. At least one token is behind
    /// them: its logits are to be computed.
    pub fn find(&self, prompt: &[u32]) -> Vec<NodeId> {
        let mut found = Vec::new();
        for tokens in prompt[..prompt.len().saturating_sub(1)].chunks_exact(self.chunk) {
            let Some(node) = self.index.get(&(found.last().copied(), tokens.into())) else { break };
            found.push(*node);
        }
        found
    }

    /// The pages of these nodes, in the order of their tokens.
    pub fn pages(&self, nodes: &[NodeId]) -> Vec<u32> {
        nodes.iter().filter_map(|node| self.nodes.get(node.0)?.as_ref()).flat_map(|node| node.pages.clone()).collect()
    }

    /// Notes that a sequence reads these nodes.
    pub fn hold(&mut self, nodes: &[NodeId]) {
        self.each(nodes, |users| users + 1);
    }

    /// Notes that a sequence no longer reads these nodes. They stay until their pages are needed.
    pub fn release(&mut self, nodes: &[NodeId]) {
        self.each(nodes, |users| users.saturating_sub(1));
    }

    fn each(&mut self, nodes: &[NodeId], users: impl Fn(u32) -> u32) {
        self.clock += 1;
        for id in nodes {
            if let Some(node) = self.nodes.get_mut(id.0).and_then(Option::as_mut) {
                self.idle -= node.idle_pages();
                (node.users, node.used) = (users(node.users), self.clock);
                self.idle += node.idle_pages();
            }
        }
    }

    /// Adds a chunk behind `parent`, held by the sequence that computed it. `None` if the cache has it already: the
    /// pages stay with the sequence.
    pub fn insert(&mut self, parent: Option<NodeId>, tokens: &[u32], pages: &[u32]) -> Option<NodeId> {
        let key: Key = (parent, tokens.into());
        if tokens.len() != self.chunk || self.index.contains_key(&key) {
            return None;
        }
        self.clock += 1;
        let node = Node { key: key.clone(), pages: pages.to_vec(), users: 1, children: 0, used: self.clock };
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[at] = Some(node);
        self.index.insert(key, NodeId(at));
        if let Some(parent) = parent.and_then(|parent| self.nodes.get_mut(parent.0)?.as_mut()) {
            parent.children += 1;
        }
        Some(NodeId(at))
    }

    /// The number of pages that no sequence reads. A sequence that reads a node reads its ancestors, so all of these
    /// pages can be evicted.
    pub fn idle_pages(&self) -> u32 {
        debug_assert_eq!(self.idle, self.nodes.iter().flatten().map(Node::idle_pages).sum::<u32>());
        self.idle
    }

    /// The pages of all nodes.
    #[cfg(test)]
    pub fn all_pages(&self) -> Vec<u32> {
        self.nodes.iter().flatten().flat_map(|node| node.pages.clone()).collect()
    }

    /// The number of pages of these nodes that no sequence reads.
    pub fn idle_of(&self, nodes: &[NodeId]) -> u32 {
        nodes.iter().filter_map(|node| self.nodes.get(node.0)?.as_ref()).map(Node::idle_pages).sum()
    }

    /// Forgets nodes that no sequence reads, the least recently used first, until they had `count` pages or more.
    /// Returns their pages.
    pub fn evict(&mut self, count: u32) -> Vec<u32> {
        let mut pages = Vec::new();
        while pages.len() < count as usize {
            let leaves = self.nodes.iter().enumerate().filter_map(|(at, node)| Some((at, node.as_ref()?)));
            let idle = leaves.filter(|(_, node)| node.users == 0 && node.children == 0);
            let Some(at) = idle.min_by_key(|(_, node)| node.used).map(|(at, _)| at) else { break };
            let Some(node) = self.nodes[at].take() else { break };
            self.idle -= node.idle_pages();
            self.vacant.push(at);
            self.index.remove(&node.key);
            if let Some(parent) = node.key.0.and_then(|parent| self.nodes.get_mut(parent.0)?.as_mut()) {
                parent.children -= 1;
            }
            pages.extend(node.pages);
        }
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_beginning_is_found() {
        let mut cache = PrefixCache::new(2);
        let first = cache.insert(None, &[1, 2], &[10]).unwrap();
        let second = cache.insert(Some(first), &[3, 4], &[11]).unwrap();
        let other = cache.insert(None, &[3, 4], &[12]).unwrap();
        assert_eq!(cache.insert(Some(first), &[3, 4], &[13]), None, "once");
        assert_eq!(cache.insert(None, &[1, 2, 3], &[13]), None, "whole chunks");
        assert_eq!(cache.find(&[1, 2, 3, 4, 5]), [first, second]);
        assert_eq!(cache.find(&[1, 2, 3, 4]), [first], "a token is left to compute");
        assert_eq!(cache.find(&[1, 2, 9, 4, 5]), [first]);
        assert_eq!(cache.find(&[3, 4, 3, 4, 5]), [other]);
        assert_eq!((cache.find(&[]), cache.find(&[2, 1, 3])), (vec![], vec![]));
        assert_eq!(cache.pages(&[first, second]), [10, 11]);
    }

    #[test]
    fn the_least_recently_used_leaves_are_evicted() {
        let mut cache = PrefixCache::new(1);
        let first = cache.insert(None, &[1], &[10]).unwrap();
        let second = cache.insert(Some(first), &[2], &[11]).unwrap();
        let other = cache.insert(None, &[3], &[12, 13]).unwrap();
        assert_eq!((cache.idle_pages(), cache.evict(9)), (0, vec![]), "all are read");
        cache.release(&[other]);
        cache.release(&[first, second]);
        assert_eq!((cache.idle_pages(), cache.idle_of(&[other])), (4, 2));
        cache.hold(&[first]);
        assert_eq!((cache.idle_pages(), cache.evict(1)), (3, vec![12, 13]));
        assert_eq!(cache.evict(9), [11], "the first is read");
        cache.release(&[first]);
        assert_eq!(cache.evict(1), [10]);
        assert_eq!((cache.find(&[1, 2, 3]), cache.idle_pages()), (vec![], 0));
        assert_eq!(cache.insert(None, &[4], &[14]).map(|node| cache.pages(&[node])), Some(vec![14]));
    }
}
